// The generation servers, with the speed that their own reports tell.

import { gauge, stateChip, versionChip } from "./marks.js";
import { fill, h } from "./element.js";
import { count, duration, NONE, percent } from "./format.js";

const WINDOW_S = 6;
const COLUMNS = ["Server", "State", "Version", "Running", "Queued", "Cache", "Tokens/s", "Busy", "Up"];

export function fleetTable() {
  const body = h("tbody");
  const head = COLUMNS.map((name, i) => h("th", { scope: "col", class: i > 2 ? "number" : null }, name));
  const element = h("table", { class: "wide" }, h("thead", {}, h("tr", {}, head)), body);
  const reports = new Map();

  const update = (servers) => {
    for (const server of servers) remember(reports, server);
    const rows = servers.map((server) => row(server, rates(reports.get(server.server_id))));
    const none = h("tr", {}, h("td", { colspan: COLUMNS.length, class: "none" }, "no server has reported itself yet"));
    fill(body, rows.length ? rows : none);
  };
  return { element, update };
}

function remember(reports, server) {
  const known = reports.get(server.server_id) ?? [];
  const last = known.at(-1);
  if (last && server.uptime_s < last.uptime_s) known.length = 0;
  if (last?.uptime_s !== server.uptime_s) known.push(server);
  while (known.length > 2 && known.at(-1).uptime_s - known[1].uptime_s >= WINDOW_S) known.shift();
  reports.set(server.server_id, known);
}

function rates(known) {
  const [first, last] = [known[0], known.at(-1)];
  const elapsed = last.uptime_s - first.uptime_s;
  if (elapsed <= 0) return { speed: null, busy: null };
  return {
    speed: (last.generated_tokens - first.generated_tokens) / elapsed,
    busy: Math.min(1, (last.busy_s - first.busy_s) / elapsed),
  };
}

// What a lost server did when it was last heard of says nothing of now.
function lostRow(server) {
  return h("tr", { "data-server": server.server_id },
    h("th", { scope: "row", title: server.url }, server.server_id),
    h("td", {}, stateChip(server.state)),
    h("td", {}, versionChip(server.version)),
    COLUMNS.slice(3).map(() => h("td", { class: "number" }, NONE)));
}

function row(server, { speed, busy }) {
  if (server.state === "lost") return lostRow(server);
  const running = server.max_running ? `${count(server.running)} / ${count(server.max_running)}` : count(server.running);
  return h("tr", { "data-server": server.server_id },
    h("th", { scope: "row", title: server.url }, server.server_id),
    h("td", {}, stateChip(server.state)),
    h("td", {}, versionChip(server.version)),
    h("td", { class: "number" }, running),
    h("td", { class: "number" }, count(server.queued)),
    h("td", { class: "number" }, gauge(server.kv_usage, "cache in use"), h("span", { class: "share" }, percent(server.kv_usage))),
    h("td", { class: "number" }, speed === null ? NONE : count(speed)),
    h("td", { class: "number" }, busy === null ? NONE : percent(busy)),
    h("td", { class: "number" }, duration(server.uptime_s)));
}
