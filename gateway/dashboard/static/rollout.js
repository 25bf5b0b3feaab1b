// One rollout: its siblings side by side, the tokens of one of them, and what happened to it.

import { getRollout } from "./api.js";
import { fill, h } from "./element.js";
import { duration, moment } from "./format.js";
import { lineage } from "./lineage.js";
import { siblings } from "./siblings.js";
import { transcript } from "./transcript.js";

const OPEN = ["queued", "leased", "ready", "delivered"];

export function rollout(id) {
  const head = h("header", { class: "title" });
  const strip = h("div", { class: "siblings", role: "group", "aria-label": "Siblings" });
  const story = h("div", { class: "story" });
  const reader = transcript();
  const prompt = h("div");
  const element = h("div", { class: "rollout" }, head, h("div", { class: "reading" }, strip, reader.element, prompt), h("aside", {}, story));
  const view = { title: id, element, refresh, every: 2 };
  let told = null;
  let chosen = 0;

  async function refresh(signal) {
    if (told === null) document.addEventListener("keydown", press, { signal });
    const answer = await getRollout(id, signal);
    view.every = OPEN.includes(answer.summary.state) ? 2 : 0;
    if (told !== null && JSON.stringify(answer) === JSON.stringify(told)) return;
    const isFirst = !told?.group;
    told = answer;
    fill(head, makeTitle(answer));
    if (isFirst) choose(0);
    fill(story, lineage(answer, chosen));
  }

  function choose(place) {
    const rows = told.group?.trajectories ?? [];
    chosen = Math.min(Math.max(0, place), Math.max(0, rows.length - 1));
    fill(strip, siblings(rows, chosen, choose));
    reader.element.hidden = !rows.length;
    fill(prompt, rows.length ? null : makePrompt(told));
    fill(story, lineage(told, chosen));
    if (rows.length) reader.show(rows[chosen]);
  }

  function press(event) {
    if (event.target.closest("select, input:not([type=radio])") || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = { "[": () => choose(chosen - 1), "]": () => choose(chosen + 1), v: () => reader.colour("version"), l: () => reader.colour("logprob") }[event.key];
    if (act && told?.group) act();
  }
  return view;
}

function makeTitle({ summary }) {
  const took = duration(Math.max(0, summary.changed_at - summary.submitted_at));
  return [
    h("p", { class: "trail" }, h("a", { href: "#/rollouts" }, "Rollouts"), " / "),
    h("h2", {}, summary.rollout_id),
    h("span", { class: `state is-${summary.state}` }, summary.state),
    h("p", { class: "when" }, `submitted ${moment(summary.submitted_at)}, ${summary.state} after ${took}`),
    summary.reason ? h("p", { class: "reason" }, summary.reason) : null,
  ];
}

// What is known before there are tokens, or after they were forgotten.
function makePrompt({ summary, request }) {
  const { text, messages, input_ids } = request.prompt;
  const kept = OPEN.includes(summary.state) ? "Nothing is finished yet; it starts from this prompt." : "Its tokens are not kept; it started from this prompt.";
  const said = messages
    ? messages.map((message) => h("section", { class: "segment given" }, h("header", {}, message.role), h("p", { class: "text" }, message.content)))
    : h("section", { class: "segment given" }, h("header", {}, "prompt"), h("p", { class: "text" }, text ?? input_ids.join(" ")));
  return [h("p", { class: "none" }, kept), said];
}
