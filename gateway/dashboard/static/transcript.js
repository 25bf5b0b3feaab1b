// The tokens of one trajectory, coloured by the version that sampled them or by how likely they were.
// Tokens are not elements: runs of one colour are, and a place in the text is looked up when it is asked for.

import { hueOf, surpriseOf, SURPRISES, versionChip } from "./marks.js";
import { fill, h } from "./element.js";
import { decimal, percent } from "./format.js";
import { notes } from "./notes.js";
import { runs, segmentsOf } from "./runs.js";

const MODES = [["version", "policy version"], ["logprob", "logprob"]];

export function transcript() {
  const legend = h("div", { class: "legend" });
  const inspector = h("p", { class: "inspector", "aria-live": "polite" });
  const text = h("div", { class: "tokens", tabindex: "0", role: "region", "aria-label": "Tokens; the arrow keys go from one to the next" });
  const choices = MODES.map(([mode, words]) => h("label", {}, h("input", { type: "radio", name: "colour", value: mode, onchange: () => colour(mode) }), h("span", {}, words)));
  const element = h("section", { class: "transcript", hidden: true },
    h("div", { class: "toolbar" }, h("fieldset", { class: "choice" }, h("legend", {}, "Colour by"), choices), legend, inspector), text);
  let row = null;
  let mode = "version";
  let place = -1;
  let words = [];
  let ends = [];

  function show(given) {
    row = given;
    words = row.tokens ?? row.input_ids.map((id) => `${id} `);
    let end = 0;
    ends = words.map((word) => (end += word.length));
    place = -1;
    draw();
  }

  function colour(given) {
    mode = given;
    if (row) draw();
  }

  function draw() {
    for (const choice of choices) choice.firstChild.checked = choice.firstChild.value === mode;
    text.dataset.mode = mode;
    fill(legend, mode === "version" ? versionLegend(row) : logprobLegend());
    let number = 0;
    text.replaceChildren(...segmentsOf(row).map((segment) => {
      if (segment.isSampled) number += 1;
      return drawSegment(segment, number);
    }));
    inspect(place);
  }

  function drawSegment(segment, number) {
    const { from, to, isSampled } = segment;
    const turn = row.turns[segment.turn];
    const size = `${to - from} tokens`;
    const name = isSampled ? `turn ${number}` : from === 0 ? "prompt" : "given";
    const facts = [size, turn && turn.end === to ? `ended by ${turn.stop_reason}` : null, turn?.reward != null ? `reward ${decimal(turn.reward, 3)}` : null].filter(Boolean);
    return h("section", { class: `segment ${isSampled ? "sampled" : "given"}` },
      h("header", {}, h("b", {}, name), facts.map((fact) => h("span", {}, fact))),
      h("p", { class: "text" }, isSampled ? paint(from, to) : plain(from, to)),
      turn && turn.end === to ? notes(turn.note) : null);
  }

  const said = (from, to) => words.slice(from, to).join("");
  const plain = (from, to) => h("span", { "data-from": from }, said(from, to));

  function paint(from, to) {
    if (mode === "version") {
      return runs(from, to, (i) => row.versions[i]).map((run) =>
        h("span", { class: `token v${hueOf(run.value)}`, "data-version": run.value, "data-from": run.from }, said(run.from, run.to)));
    }
    return runs(from, to, (i) => surpriseOf(row.logprobs[i])).map((run) =>
      h("span", { class: `token s${run.value}`, "data-surprise": run.value, "data-from": run.from }, said(run.from, run.to)));
  }

  // Which token a position of the text belongs to.
  function placeAt(node, offset) {
    const span = node?.parentElement?.closest("[data-from]");
    if (!span || !text.contains(span)) return -1;
    const from = Number(span.dataset.from);
    const at = (from ? ends[from - 1] : 0) + offset;
    let [low, high] = [from, ends.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] > at) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  function inspect(given) {
    place = given;
    globalThis.CSS?.highlights?.delete("cursor");
    if (place < 0) {
      fill(inspector, h("span", { class: "none" }, "point at a token, or use the arrow keys"));
      return;
    }
    const sampled = row.loss_mask[place];
    const likely = sampled ? `logprob ${decimal(row.logprobs[place], 3)} (${percent(Math.exp(row.logprobs[place]))})` : "given, not sampled";
    fill(inspector, h("code", {}, JSON.stringify(words[place])), `#${place}`, ` id ${row.input_ids[place]}`, h("span", {}, likely), sampled ? versionChip(row.versions[place]) : null);
    mark();
  }

  function mark() {
    if (!globalThis.Highlight) return;
    const spans = [...text.querySelectorAll("[data-from]")];
    const span = spans.findLast((one) => Number(one.dataset.from) <= place);
    const from = Number(span.dataset.from);
    const base = from ? ends[from - 1] : 0;
    const range = new StaticRange({ startContainer: span.firstChild, startOffset: (place ? ends[place - 1] : 0) - base, endContainer: span.firstChild, endOffset: ends[place] - base });
    CSS.highlights.set("cursor", new Highlight(range));
  }

  function pointAt(event) {
    const caret = document.caretPositionFromPoint?.(event.clientX, event.clientY);
    const range = caret ? null : document.caretRangeFromPoint?.(event.clientX, event.clientY);
    const found = placeAt(caret?.offsetNode ?? range?.startContainer, caret?.offset ?? range?.startOffset ?? 0);
    if (found >= 0 && found !== place) inspect(found);
  }

  text.addEventListener("pointermove", pointAt);
  text.addEventListener("click", pointAt);
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !row) return;
    event.preventDefault();
    inspect(Math.min(words.length - 1, Math.max(0, place + step)));
  });
  return { element, show, colour };
}

function versionLegend(row) {
  const found = [...new Set(row.versions.filter((_, i) => row.loss_mask[i]))].sort((one, other) => one - other);
  return [...found.map(versionChip), h("span", { class: "swatch given" }, "given")];
}

function logprobLegend() {
  const share = (nats) => percent(Math.exp(-nats));
  const steps = [0, ...SURPRISES].map((_, i) => h("span", { class: `swatch s${i}`, title: i ? `less likely than ${share(SURPRISES[i - 1])}` : `at least ${share(SURPRISES[0])}` }, ""));
  return [h("span", {}, "certain"), h("span", { class: "ramp" }, steps), h("span", {}, "unlikely"), h("span", { class: "swatch given" }, "given")];
}
