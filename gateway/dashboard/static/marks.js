// What a colour means, everywhere on the page: a version, a state, how likely a token was.

import { h, svg } from "./element.js";

export const NUM_HUES = 8;

// Neighbouring versions get distant hues; the same version has the same one in every view.
export const hueOf = (version) => version % NUM_HUES;

export function versionChip(version) {
  return h("span", { class: `version v${hueOf(version)}`, "data-version": version }, `v${version}`);
}

export function stateChip(state) {
  return h("span", { class: `state is-${state}` }, state);
}

// A share as a bar.
export function gauge(share, words, tone = "plain") {
  return svg("svg", { class: `gauge ${tone}`, viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": words },
    svg("rect", { class: "back", width: 100, height: 10 }),
    svg("rect", { width: 100 * Math.min(1, Math.max(0, share)), height: 10 }));
}

// Upper bounds of "how unlikely" in nats, minus the logprob; what is above the last has the strongest tint.
export const SURPRISES = [0.02, 0.1, 0.3, 0.7, 1.5, 3, 6];

export function surpriseOf(logprob) {
  const bin = SURPRISES.findIndex((bound) => -logprob <= bound);
  return bin < 0 ? SURPRISES.length : bin;
}
