// Which view is shown, and when it asks again: every few seconds, while the page is visible.

import { hasToken, keepToken, Refused } from "./api.js";
import { h } from "./element.js";
import { clock } from "./format.js";
import { listing } from "./listing.js";
import { overview } from "./overview.js";
import { rollout } from "./rollout.js";

const page = document.getElementById("page");
const pulse = document.getElementById("pulse");
const ask = document.getElementById("ask");
let leaving = new AbortController();

// "#/rollouts?state=ready" -> a view: its element, how to refresh it, and how often (0: once).
function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  if (name === "rollouts" && rest.length) return ["rollouts", rollout(decodeURIComponent(rest.join("/")))];
  if (name === "rollouts") return ["rollouts", listing(new URLSearchParams(query))];
  return ["overview", overview()];
}

function show() {
  leaving.abort();
  leaving = new AbortController();
  const [name, view] = route();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view.title} \u00b7 Headway`;
  page.replaceChildren(view.element);
  window.scrollTo(0, 0);
  follow(view, leaving.signal);
}

async function follow(view, signal) {
  let answeredAt = null;
  while (!signal.aborted) {
    try {
      await view.refresh(signal);
      answeredAt = Date.now() / 1000;
      tell(view.every ? "live" : "", "live");
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused) {
        await tokenFor(error.message);
        continue;
      }
      const since = answeredAt === null ? "" : `; shown as of ${clock(answeredAt)}`;
      tell(`${error.message}${since}`, "ill");
      if (answeredAt === null) page.replaceChildren(h("p", { class: "empty" }, error.message));
      if (!view.every) return;
    }
    if (!view.every) return;
    await pause(view.every, signal);
  }
}

function tell(words, state) {
  pulse.dataset.state = words ? state : "";
  if (pulse.textContent !== words) pulse.textContent = words;
}

// So many seconds, and then until the page is visible, or left.
function pause(seconds, signal) {
  return new Promise((done) => {
    const end = () => {
      document.removeEventListener("visibilitychange", look);
      done();
    };
    const look = () => document.hidden || end();
    const timer = setTimeout(() => (document.hidden ? document.addEventListener("visibilitychange", look) : end()), seconds * 1000);
    signal.addEventListener("abort", () => { clearTimeout(timer); end(); }, { once: true });
  });
}

// Ask for a token until one is given.
function tokenFor(why) {
  document.getElementById("ask-why").textContent = hasToken() ? why : "";
  keepToken(null);
  return new Promise((done) => {
    const form = ask.querySelector("form");
    form.onsubmit = (event) => {
      event.preventDefault();
      keepToken(form.elements.token.value);
      form.reset();
      ask.close();
      done();
    };
    ask.oncancel = (event) => event.preventDefault();
    if (!ask.open) ask.showModal();
  });
}

window.addEventListener("hashchange", show);
show();
