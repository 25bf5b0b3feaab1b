// What was noted beside the tokens: tool calls and their results, messages, verdicts, details.

import { h } from "./element.js";

const MAX_DEPTH = 4;

// A record's entries, or nothing where it is empty.
export function notes(record) {
  const entries = Object.entries(record ?? {});
  if (!entries.length) return null;
  return h("dl", { class: "notes" }, entries.flatMap(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, show(value, 0))]));
}

function show(value, depth) {
  if (typeof value === "string") return h("p", { class: "said" }, value);
  if (value === null || typeof value !== "object") return String(value);
  if (depth >= MAX_DEPTH) return h("code", {}, JSON.stringify(value));
  if (Array.isArray(value)) return value.length ? h("ol", {}, value.map((one) => h("li", {}, show(one, depth + 1)))) : "none";
  const entries = Object.entries(value);
  if (typeof value.role === "string" && typeof value.content === "string" && entries.length === 2) {
    return [h("b", { class: "role" }, value.role), h("p", { class: "said" }, value.content)];
  }
  return h("dl", {}, entries.flatMap(([name, inner]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, show(inner, depth + 1))]));
}
