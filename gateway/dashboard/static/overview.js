// What the service is doing: versions, queue, speed, rewards, staleness, the fleet, the newest rollouts.

import { getDashboard, getRollouts } from "./api.js";
import { histogram, timeChart } from "./chart.js";
import { gauge, stateChip, versionChip } from "./marks.js";
import { fill, h } from "./element.js";
import { fleetTable } from "./fleet.js";
import { count, decimal, duration, NONE } from "./format.js";
import { rolloutTable } from "./listing.js";

const KEPT = 300;
const SPEED_POINTS = 3;
const REWARD_POINTS = 15;
const NEWEST = 8;
const TOLD_OF = ["consumed", "delivered", "ready", "leased"];
const STATES = ["queued", "leased", "ready", "delivered", "consumed", "failed", "filtered", "stale", "cancelled"];

export function overview() {
  const readouts = h("section", { class: "readouts", "aria-label": "Now" });
  const charts = makeCharts();
  const fleet = fleetTable();
  const states = h("tbody");
  const failures = h("ol", { class: "failures" });
  const newest = h("div");
  const newestTitle = h("h2");
  const element = h("div", { class: "overview" },
    readouts,
    h("section", { class: "charts", "aria-label": "Last minutes" }, charts.map((chart) => chart.element)),
    h("div", {},
      h("section", { class: "fleet" }, h("h2", {}, "Fleet"), fleet.element),
      h("section", { class: "newest" }, newestTitle, newest)),
    h("div", {},
      h("section", { class: "states" }, h("h2", {}, "Trajectories by state"), h("table", {}, states)),
      h("section", {}, h("h2", {}, "Newest failed rollouts"), failures)));
  let history = [];

  const refresh = async (signal) => {
    const told = await getDashboard(history.at(-1)?.at ?? 0, signal);
    const state = TOLD_OF.find((one) => told.status.counts[one]) ?? "";
    const listed = await getRollouts({ limit: NEWEST, state }, signal);
    const failed = await getRollouts({ limit: NEWEST, state: "failed" }, signal);
    history = [...history, ...told.history].slice(-KEPT);
    const points = derive(history);
    fill(readouts, makeReadouts(told, points));
    for (const chart of charts) chart.update(points, told);
    fleet.update(told.status.servers);
    fill(states, STATES.map((state) => stateRow(state, told.status.counts)));
    fill(failures, failed.rollouts.length ? failed.rollouts.map(failure) : h("li", { class: "none" }, "none"));
    fill(newestTitle, `Newest ${state} rollouts`, h("a", { href: "#/rollouts", "data-key": "all" }, "all rollouts"));
    fill(newest, rolloutTable(listed.rollouts, told.now));
  };
  return { title: "Overview", element, refresh, every: 2 };
}

// Points with what is a difference, or a mean, over the last of them.
function derive(history) {
  return history.map((point, i) => {
    const before = history[Math.max(0, i - SPEED_POINTS)];
    const elapsed = point.at - before.at;
    const near = history.slice(Math.max(0, i - REWARD_POINTS + 1), i + 1).filter((one) => one.num_rewards);
    const num = near.reduce((sum, one) => sum + one.num_rewards, 0);
    const reward = num ? near.reduce((sum, one) => sum + one.mean_reward * one.num_rewards, 0) / num : null;
    return {
      ...point,
      speed: elapsed > 0 ? Math.max(0, (point.generated_tokens - before.generated_tokens) / elapsed) : null,
      reward,
      rewarded: num,
    };
  });
}

function makeReadouts({ status, weights, scale, sessions_open, history }, points) {
  const last = points.at(-1);
  const numIn = (state) => status.servers.filter((server) => server.state === state).length;
  const [ready, lost] = [numIn("ready"), numIn("lost")];
  const publishing = weights.publishing === null ? "" : `publishing v${weights.publishing}`;
  const pinned = weights.pinned === null ? "" : "pinned";
  const newest = `newest v${status.head}`;
  return [
    readout("Policy version", versionChip(status.version), [newest, pinned, publishing].filter(Boolean).join(" \u00b7 ")),
    readout("Servers ready", `${ready} / ${status.servers.length - lost}`, `${lost ? `${lost} lost \u00b7 ` : ""}${scale.wanted} wanted: ${scale.reason}`),
    readout("In play", count(status.running), status.max_staleness === null ? `no staleness bound` : `staleness \u2264\u00a0${status.max_staleness}, ${count(status.capacity)} more may start`),
    readout("Waiting", count(status.counts.queued), scale.queue_wait_s ? `started within ${duration(scale.queue_wait_s)}` : `${count(status.counts.ready)} ready to train on`),
    readout("Tokens per second", last ? count(last.speed) : NONE, `${count(status.generated_tokens)} in all`),
    readout("Reward, last 30 s", last ? decimal(last.reward, 3) : NONE, `${count(last?.rewarded ?? 0)} trajectories`),
    readout("Sessions", count(sessions_open), "open here"),
  ];
}

function readout(label, value, more) {
  return h("div", { class: "readout" }, h("h3", {}, label), h("p", { class: "value" }, value), h("p", { class: "more", title: more }, more));
}

function makeCharts() {
  const queue = timeChart({
    title: "Trajectories on their way",
    series: ["queued", "leased", "ready", "delivered"].map((state) => ({ name: state, kind: "area", tone: `is-${state}`, read: (point) => point[state] })),
    tell: (point) => count(point.queued + point.leased + point.ready + point.delivered),
  });
  const speed = timeChart({
    title: "Tokens per second",
    series: [
      { kind: "area", tone: "speed", read: (point) => point.speed },
      { kind: "line", tone: "speed", read: (point) => point.speed },
    ],
    tell: (point) => count(point.speed),
  });
  const reward = timeChart({
    title: "Mean reward",
    series: [
      { kind: "dots", tone: "rewards", read: (point) => point.mean_reward },
      { kind: "line", tone: "reward", read: (point) => point.reward },
    ],
    tell: (point) => decimal(point.reward, 3),
  });
  const staleness = histogram({ title: "Staleness at delivery" });
  return [
    { ...queue, update: (points) => queue.draw(points) },
    { ...speed, update: (points) => speed.draw(points) },
    { ...reward, update: (points) => reward.draw(points) },
    { ...staleness, update: (points, told) => drawStaleness(staleness, points, told.status.max_staleness) },
  ];
}

function drawStaleness(chart, points, bound) {
  const counts = new Map();
  for (const point of points) {
    for (const [versions, number] of Object.entries(point.staleness)) {
      counts.set(Number(versions), (counts.get(Number(versions)) ?? 0) + number);
    }
  }
  const number = [...counts.values()].reduce((sum, one) => sum + one, 0);
  const mean = [...counts].reduce((sum, [versions, one]) => sum + versions * one, 0) / number;
  const limit = bound === null ? "" : `, bound ${bound}`;
  chart.draw(counts, bound, number ? `mean ${decimal(mean)}${limit}` : "none delivered");
}

function failure({ rollout_id, reason }) {
  return h("li", {}, h("a", { href: `#/rollouts/${encodeURIComponent(rollout_id)}`, "data-key": `failed-${rollout_id}` }, rollout_id), ` ${reason}`);
}

function stateRow(state, counts) {
  const share = counts.submitted ? counts[state] / counts.submitted : 0;
  const link = h("a", { href: `#/rollouts?state=${state}`, "data-key": state }, stateChip(state));
  return h("tr", {}, h("th", { scope: "row" }, link), h("td", { class: "number" }, count(counts[state])),
    h("td", { class: "gauges" }, gauge(share, `share of ${state}`, `is-${state}`)));
}
