// The page: one view at a time by the address's hash, refreshed while it is looked at; keys; dark and light.

import { keepKey } from "./api.js";
import { startChat, stop } from "./chat.js";
import { $ } from "./dom.js";
import { showFleet } from "./fleet.js";
import { showRequests } from "./requests.js";
import { showRoute, startRoute } from "./route.js";

const VIEWS = { chat: null, requests: showRequests, fleet: showFleet, route: showRoute };
const REFRESH_MS = 2000;
const REFRESHED = new Set(["requests", "fleet"]);
let current = "chat";

async function refresh() {
  try {
    await VIEWS[current]?.();
    $("notice").hidden = true;
  } catch (error) {
    $("notice").textContent = error.status === 401 ? "This gateway needs an API key: put one into the field above." : error.message;
    $("notice").hidden = false;
  }
}

function enter() {
  const name = location.hash.slice(1);
  current = Object.hasOwn(VIEWS, name) ? name : "chat";
  for (const view of Object.keys(VIEWS)) $(`view-${view}`).hidden = view !== current;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${current}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (current === "chat") $("prompt").focus({ preventScroll: true });
  refresh();
}

function onKey(event) {
  if (event.key === "Escape") stop();
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
  const view = Object.keys(VIEWS)[Number(event.key) - 1];
  if (view) location.hash = view;
  if (event.key === "/") {
    event.preventDefault();
    location.hash = "chat";
    $("prompt").focus();
  }
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

keepKey();
startChat();
startRoute();
$("theme").addEventListener("click", switchTheme);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  refresh();
});
addEventListener("hashchange", enter);
addEventListener("keydown", onKey);
setInterval(() => REFRESHED.has(current) && !document.hidden && refresh(), REFRESH_MS);
enter();
