// Where a rollout came from and where it went: what was asked, and every event with its time.

import { h } from "./element.js";
import { clock, decimal, duration, moment, NONE } from "./format.js";
import { versionChip } from "./marks.js";
import { notes } from "./notes.js";

export function lineage({ summary, request, events, group }, chosen) {
  return [
    h("h3", {}, "Outcome"), list(outcome(summary)),
    h("h3", {}, "Events"), h("ol", { class: "events" }, events.map((event, i) => line(event, events[i - 1] ?? event))),
    ...verdict(group?.trajectories[chosen]),
    h("h3", {}, "Asked for"), list(asked(summary, request)),
  ];
}

function list(facts) {
  const known = facts.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, known.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function outcome(summary) {
  const oldest = summary.oldest_version;
  return [
    ["mean reward", decimal(summary.mean_reward, 3)],
    ["oldest version", oldest === null || oldest < 0 ? NONE : versionChip(oldest)],
    ["staleness", summary.staleness === null ? NONE : `${summary.staleness} at delivery`],
    ["consumed by", summary.step === null ? NONE : `step ${summary.step} of ${summary.consumer}`],
    ["attempt", String(summary.attempt)],
  ];
}

function line(event, before) {
  const since = event === before ? clock(event.at) : `+${duration(event.at - before.at)}`;
  return h("li", {},
    h("time", { datetime: new Date(event.at * 1000).toISOString(), title: moment(event.at) }, since),
    h("b", {}, event.event.replaceAll("_", " ")),
    event.detail ? h("span", {}, event.detail.replaceAll("_", " ").replaceAll("=", " ")) : null);
}

function verdict(row) {
  if (!row) return [];
  const name = `sample ${row.sample_index}${row.branch ? `.${row.branch}` : ""}`;
  return [h("h3", {}, `Verifier on ${name}`), notes({ verdict: row.verdict.replaceAll("_", " "), ...row.details })];
}

function asked(summary, { workflow, reward, filter, gconfig, versions, priority, timeout_s, prompt }) {
  const args = (part) => part && `${part.name}${Object.keys(part.args ?? {}).length ? ` ${JSON.stringify(part.args)}` : ""}`;
  const bounds = [versions.min_version !== null ? `from v${versions.min_version}` : "", versions.max_version !== null ? `up to v${versions.max_version}` : "", versions.pin ? "pinned" : ""];
  return [
    ["consumer", summary.consumer],
    ["group", `${summary.group_id}, ${summary.group_size} samples`],
    ["workflow", args(workflow)],
    ["reward", args(reward)],
    ["filter", args(filter)],
    ["sampling", `temperature ${gconfig.temperature}, at most ${gconfig.max_new_tokens} tokens`],
    ["versions", bounds.filter(Boolean).join(", ")],
    ["priority", priority || null],
    ["timeout", timeout_s === null ? null : duration(timeout_s)],
    ["data", Object.keys(prompt.data).length ? JSON.stringify(prompt.data) : null],
  ];
}
