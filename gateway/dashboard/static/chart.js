// Small charts as SVG: time series with the moments of publication, and a histogram.

import { hueOf } from "./marks.js";
import { h, svg } from "./element.js";
import { clock, count } from "./format.js";

const HEIGHT = 132;
const TOP = 16;
const BOTTOM = 18;
const FLOOR = HEIGHT - BOTTOM;
const MIN_SPAN_S = 60;

// A figure whose caption tells the newest value, or the one under the pointer.
//   series: [{name, kind: "area" | "line" | "dots", read: point -> number | null}]; areas are stacked
//   tell: point -> the caption's text
export function timeChart({ title, series, tell, top = null }) {
  const output = h("output");
  const image = svg("svg", { height: HEIGHT, role: "img" });
  const named = series.filter((one) => one.name);
  const legend = named.length > 1
    ? h("ul", { class: "legend" }, named.map((one) => h("li", { class: one.tone }, one.name)))
    : null;
  const element = h("figure", { class: "chart" }, h("figcaption", {}, h("span", {}, title), output), image, legend);
  let points = [];
  let pointer = null;

  const place = () => {
    const end = points.at(-1).at;
    const start = Math.min(points[0].at, end - MIN_SPAN_S);
    const width = image.clientWidth || 280;
    return { start, end, width, x: (at) => ((at - start) / (end - start)) * width };
  };

  const read = () => {
    if (!points.length) return;
    const { x, width } = place();
    let point = points.at(-1);
    image.querySelector(".cursor")?.remove();
    if (pointer !== null) {
      point = points.reduce((best, one) => (Math.abs(x(one.at) - pointer) < Math.abs(x(best.at) - pointer) ? one : best));
      const at = Math.min(width - 0.5, Math.max(0.5, x(point.at)));
      image.append(svg("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: FLOOR }));
    }
    output.textContent = pointer === null ? tell(point) : `${clock(point.at)}  ${tell(point)}`;
  };

  image.addEventListener("pointermove", (event) => { pointer = event.offsetX; read(); });
  image.addEventListener("pointerleave", () => { pointer = null; read(); });

  const draw = (given) => {
    points = given;
    if (!points.length) return;
    const at = place();
    image.setAttribute("viewBox", `0 0 ${at.width} ${HEIGHT}`);
    image.setAttribute("aria-label", `${title}: ${tell(points.at(-1))}`);
    const { highest, shapes } = drawSeries(points, series, at, top);
    image.replaceChildren(...axis(highest, at), ...publications(points, at), ...shapes);
    read();
  };
  return { element, draw };
}

function drawSeries(points, series, { x }, top) {
  let base = points.map(() => 0);
  const stacks = [];
  let highest = top ?? 0;
  for (const one of series) {
    const values = points.map((point) => one.read(point));
    if (one.kind === "area") {
      const upper = values.map((value, i) => base[i] + (value ?? 0));
      stacks.push([base, upper]);
      base = upper;
    } else stacks.push([null, values]);
    if (top === null) highest = Math.max(highest, ...stacks.at(-1)[1].filter((value) => value !== null));
  }
  highest = top ?? roundUp(highest);
  const y = (value) => FLOOR - (value / highest) * (FLOOR - TOP);
  const shapes = series.map((one, number) => {
    const [lower, upper] = stacks[number];
    const places = points.map((point, i) => (upper[i] === null ? null : [x(point.at).toFixed(1), y(upper[i]).toFixed(1)]));
    if (one.kind === "dots") return places.filter(Boolean).map(([cx, cy]) => svg("circle", { class: one.tone, cx, cy, r: 1.6 }));
    const path = places.map((place, i) => (place ? `${places[i - 1] ? "L" : "M"}${place.join(" ")}` : "")).join("");
    if (one.kind === "line") return svg("path", { class: `line ${one.tone}`, d: path });
    const back = points.map((point, i) => `${x(point.at).toFixed(1)} ${y(lower[i]).toFixed(1)}`).reverse();
    return svg("path", { class: `area ${one.tone}`, d: `${path}L${back.join("L")}Z` });
  });
  return { highest, shapes: shapes.flat() };
}

function axis(highest, { start, end, width }) {
  const rules = [0, 0.5, 1].map((share) => {
    const y = FLOOR - share * (FLOOR - TOP) + 0.5;
    return svg("line", { class: "rule", x1: 0, x2: width, y1: y, y2: y });
  });
  const scale = svg("text", { x: 0, y: TOP - 5 }, highest < 10 ? String(highest) : count(highest));
  const minutes = (end - start) / 60;
  const from = svg("text", { x: 0, y: HEIGHT - 5 }, minutes < 1.5 ? `${Math.round(end - start)} s ago` : `${Math.round(minutes)} min ago`);
  const to = svg("text", { x: width, y: HEIGHT - 5, "text-anchor": "end" }, "now");
  return [...rules, scale, from, to];
}

// A tick in the version's colour where it began to serve.
function publications(points, { x }) {
  return points.slice(1).flatMap((point, i) => {
    if (point.version === points[i].version) return [];
    const at = x(point.at).toFixed(1);
    const line = svg("line", { class: `publication v${hueOf(point.version)}`, x1: at, x2: at, y1: TOP - 5, y2: TOP + 1 });
    line.append(svg("title", {}, `version ${point.version} serves`));
    return [line];
  });
}

// Counts by a small number; a rule stands behind the bound.
export function histogram({ title }) {
  const output = h("output");
  const image = svg("svg", { height: HEIGHT, role: "img" });
  const element = h("figure", { class: "chart" }, h("figcaption", {}, h("span", {}, title), output), image);
  const draw = (counts, bound, words) => {
    const width = image.clientWidth || 280;
    const last = Math.max(3, bound ?? 0, ...counts.keys());
    const highest = Math.max(1, ...counts.values());
    const step = width / (last + 1);
    const bar = Math.min(40, step * 0.62);
    image.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    image.setAttribute("aria-label", `${title}: ${[...counts].map(([value, number]) => `${number} at ${value}`).join(", ") || "none"}`);
    image.replaceChildren(svg("line", { class: "rule", x1: 0, x2: width, y1: FLOOR + 0.5, y2: FLOOR + 0.5 }));
    for (let value = 0; value <= last; value += 1) {
      const number = counts.get(value) ?? 0;
      const middle = (value + 0.5) * step;
      const tall = (number / highest) * (FLOOR - TOP - 4);
      const shown = number ? Math.max(1.5, tall) : 0;
      image.append(svg("rect", { class: bound !== null && value > bound ? "bar ill" : "bar", x: middle - bar / 2, y: FLOOR - shown, width: bar, height: shown }));
      if (last < 20 || value % 5 === 0) image.append(svg("text", { x: middle, y: HEIGHT - 5, "text-anchor": "middle" }, String(value)));
      if (number) image.append(svg("text", { class: "figure", x: middle, y: FLOOR - shown - 4, "text-anchor": "middle" }, count(number)));
    }
    if (bound !== null) {
      const at = (bound + 1) * step;
      image.append(svg("line", { class: "bound", x1: at, x2: at, y1: TOP, y2: FLOOR }));
    }
    output.textContent = words;
  };
  return { element, draw };
}

function roundUp(value) {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].find((factor) => factor * unit >= value) * unit;
}
