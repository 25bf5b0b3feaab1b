// Rollouts, newest first: filtered by state and consumer, page by page.

import { getRollouts } from "./api.js";
import { stateChip, versionChip } from "./marks.js";
import { fill, h } from "./element.js";
import { count, decimal, duration, NONE } from "./format.js";

const PAGE = 50;
const STATES = ["queued", "leased", "ready", "delivered", "consumed", "failed", "filtered", "stale", "cancelled"];
const COLUMNS = [["Rollout"], ["State"], ["Workflow"], ["Reward"], ["Mean", "number"], ["Oldest"], ["Staleness", "number"], ["Step", "number"], ["Attempt", "number"], ["Submitted", "number"]];

export function listing(query) {
  const [state, consumer, before] = ["state", "consumer", "before"].map((name) => query.get(name) ?? "");
  const go = (changes) => {
    const next = new URLSearchParams(Object.entries({ state, consumer, before, ...changes }).filter(([, value]) => value));
    location.hash = `#/rollouts${next.size ? `?${next}` : ""}`;
  };
  const select = h("select", { onchange: () => go({ state: select.value, before: "" }) },
    ["", ...STATES].map((name) => h("option", { value: name, selected: name === state }, name || "any")));
  const input = h("input", { value: consumer, placeholder: "any", spellcheck: "false", onchange: () => go({ consumer: input.value.trim(), before: "" }) });
  const table = h("div");
  const pages = h("nav", { class: "pages", "aria-label": "More rollouts" });
  const element = h("div", { class: "listing" },
    h("form", { class: "filters", onsubmit: (event) => { event.preventDefault(); go({ consumer: input.value.trim(), before: "" }); } },
      h("h2", {}, "Rollouts"), h("label", {}, "State ", select), h("label", {}, "Consumer ", input), pages),
    table);

  const refresh = async (signal) => {
    const told = await getRollouts({ state, consumer, before, limit: PAGE }, signal);
    fill(table, rolloutTable(told.rollouts, Date.now() / 1000));
    fill(pages,
      before ? h("button", { type: "button", "data-key": "newest", onclick: () => go({ before: "" }) }, "Newest") : null,
      told.before ? h("button", { type: "button", "data-key": "older", onclick: () => go({ before: told.before }) }, "Older") : null);
  };
  return { title: "Rollouts", element, refresh, every: before ? 0 : 2 };
}

export function rolloutTable(rollouts, now) {
  if (!rollouts.length) return h("p", { class: "none" }, "no rollouts");
  const hasReasons = rollouts.some((one) => one.reason);
  const columns = hasReasons ? [...COLUMNS, ["Reason"]] : COLUMNS;
  return h("table", { class: "wide rollouts" },
    h("thead", {}, h("tr", {}, columns.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))),
    h("tbody", {}, rollouts.map((one) => row(one, now, hasReasons))));
}

function row(one, now, hasReasons) {
  const id = one.rollout_id;
  return h("tr", { "data-rollout": id },
    h("th", { scope: "row" },
      h("a", { href: `#/rollouts/${encodeURIComponent(id)}`, "data-key": `to-${id}` }, id),
      one.group_size > 1 ? h("span", { class: "times" }, ` \u00d7 ${one.group_size}`) : null),
    h("td", {}, stateChip(one.state)),
    h("td", {}, one.workflow),
    h("td", {}, one.reward),
    h("td", { class: "number" }, decimal(one.mean_reward, 3)),
    h("td", {}, one.oldest_version === null || one.oldest_version < 0 ? NONE : versionChip(one.oldest_version)),
    h("td", { class: "number" }, one.staleness ?? NONE),
    h("td", { class: "number" }, one.step ?? NONE),
    h("td", { class: "number" }, count(one.attempt)),
    h("td", { class: "number" }, `${duration(Math.max(0, now - one.submitted_at))} ago`),
    hasReasons ? h("td", { class: "reason", title: one.reason }, one.reason ?? NONE) : null);
}
