// Figures for people: few digits, no jumps in width.

const MINUS = "\u2212";
export const NONE = "\u2013";

export function count(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e5) return `${(value / 1e3).toFixed(0)} k`;
  return Math.round(value).toLocaleString("en").replaceAll(",", "\u202f").replace("-", MINUS);
}

export function decimal(value, digits = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  return value.toFixed(digits).replace("-", MINUS);
}

export function percent(share) {
  return `${Math.round(100 * share)}\u202f%`;
}

export function duration(seconds) {
  if (seconds < 0.0995) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 99.5) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

export function moment(at) {
  const date = new Date(at * 1000);
  return `${date.toLocaleDateString("en-CA")} ${date.toLocaleTimeString("en-GB")}`;
}
