// The trajectories of one prompt side by side: reward, verdict, length, and which versions sampled where.

import { hueOf } from "./marks.js";
import { h, svg } from "./element.js";
import { count, decimal } from "./format.js";
import { runs } from "./runs.js";

export function siblings(rows, chosen, choose) {
  const best = Math.max(...rows.map((row) => row.reward));
  const worst = Math.min(...rows.map((row) => row.reward));
  return rows.map((row, place) => {
    const name = row.branch ? `${row.sample_index}.${row.branch}` : String(row.sample_index);
    const rank = best === worst ? "" : row.reward === best ? "best" : row.reward === worst ? "worst" : "";
    return h("button", { type: "button", class: `sibling ${rank}`, "aria-pressed": String(place === chosen), "data-key": `sibling-${name}`, onclick: () => choose(place) },
      h("span", { class: "name" }, `sample ${name}`),
      h("span", { class: "score" }, decimal(row.reward, 3)),
      h("span", { class: "verdict" }, `${row.verdict.replaceAll("_", " ")} \u00b7 ${count(row.input_ids.length)} tokens`),
      strip(row));
  });
}

// The whole row as a strip: grey where tokens were given, else the colour of the version.
function strip(row) {
  const size = row.input_ids.length;
  const rects = runs(0, size, (i) => (row.loss_mask[i] ? row.versions[i] : -1)).map(({ from, to, value }) =>
    svg("rect", { class: value < 0 ? "given" : `v${hueOf(value)}`, x: from, width: to - from, height: 1 }));
  return svg("svg", { class: "strip", viewBox: `0 0 ${size} 1`, preserveAspectRatio: "none", "aria-hidden": "true" }, rects);
}
