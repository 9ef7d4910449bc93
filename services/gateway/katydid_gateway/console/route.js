// Where a prompt would go now: every candidate with the terms of its predicted time to first token.

import { read } from "./api.js";
import { conversation } from "./chat.js";
import { $, count, element, seconds } from "./dom.js";

const TERMS = [["queue_s", "waiting"], ["fetch_s", "fetch"], ["prefill_s", "computed"], ["pressure_s", "shared"]];

export function startRoute() {
  $("route-form").addEventListener("submit", (event) => {
    event.preventDefault();
    explain([{ role: "user", content: $("route-prompt").value }]);
  });
  $("route-chat").addEventListener("click", () => {
    const said = conversation();
    if (said.length) explain(said);
    else $("route-answer").replaceChildren("Nothing was said yet.");
  });
}

export async function showRoute() {
  const { engines } = await read("/console/api/fleet");
  const chosen = $("route-without").value;
  const options = engines.map(({ name }) => element("option", { value: name, selected: name === chosen }, name));
  $("route-without").replaceChildren(element("option", { value: "" }, "none left out"), ...options);
}

async function explain(messages) {
  const place = $("route-answer");
  try {
    const body = { messages, without_engine: $("route-without").value };
    place.replaceChildren(...answer(await read("/console/api/explain", { body })));
  } catch (error) {
    place.replaceChildren(error.message);
  }
}

function answer({ reason, prompt_tokens, blocks, candidates }) {
  const longest = Math.max(...candidates.map((each) => each.ttft_s ?? 0), 1e-9);
  const head = ["Engine", "Rank", "Predicted TTFT", "", "Queue", "Fetch", "Prefill", "On device", "In cache", "Requests", "Home"];
  const numbers = new Set([1, 2, 4, 5, 6, 7, 8, 9, 10]);
  const cell = (tag) => (value, place) => element(tag, { class: numbers.has(place) ? "number" : "" }, value);
  const rows = candidates.map((each, place) => {
    const bar = element("div", { class: "stack" });
    bar.style.width = "120px";
    for (const [term, kind] of TERMS) {
      const part = element("div", { class: `part ${kind}`, title: term });
      part.style.width = `${(100 * (each[term] ?? 0)) / longest}%`;
      bar.append(part);
    }
    const values = each.excluded
      ? [each.engine, `${each.rank}`, each.excluded, "", "", "", "", "", "", `${each.requests}`, ""]
      : [each.engine, `${each.rank}`, seconds(each.ttft_s), bar, seconds(each.queue_s), seconds(each.fetch_s), seconds(each.prefill_s),
         `${each.device_blocks}`, `${each.cached_blocks}`, `${each.requests}`, each.home === 0 ? "yes" : `${each.home + 1}.`];
    return element("tr", { class: place === 0 && !each.excluded ? "chosen" : "" }, ...values.map(cell("td")));
  });
  return [
    element("p", {}, element("b", {}, reason), ` (${count(prompt_tokens)} tokens, ${blocks} blocks of 64)`),
    element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...head.map(cell("th")))), element("tbody", {}, ...rows))),
  ];
}
