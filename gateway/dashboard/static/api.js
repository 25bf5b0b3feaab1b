// Requests to the gateway that served this page. The token, if there is one, is kept by this tab only.

const ROOT = new URL("..", import.meta.url);
const KEY = "headway.token";

export class Refused extends Error {}

export function keepToken(token) {
  if (token === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, token);
}

export function hasToken() {
  return sessionStorage.getItem(KEY) !== null;
}

// The JSON at a path; throws Refused where a token is missing or wrong, Error with the service's words else.
export async function get(path, parameters = {}, signal = undefined) {
  const url = new URL(path, ROOT);
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  const token = sessionStorage.getItem(KEY);
  const headers = token === null ? {} : { authorization: `Bearer ${token}` };
  const answer = await fetch(url, { headers, signal, cache: "no-store" });
  if (answer.ok) return answer.json();
  const body = await answer.json().catch(() => ({}));
  const words = body.message ?? `the gateway answered ${answer.status}`;
  throw [401, 403].includes(answer.status) ? new Refused(words) : new Error(words);
}

export const getDashboard = (after, signal) => get("v1/dashboard", { after }, signal);
export const getRollouts = (filter, signal) => get("v1/rollouts", filter, signal);
export const getRollout = (id, signal) => get(`v1/rollouts/${encodeURIComponent(id)}`, {}, signal);
