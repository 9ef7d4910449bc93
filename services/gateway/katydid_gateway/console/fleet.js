// The fleet as it is now: rates are differences between two looks, the rest is what engines reported last.

import { read } from "./api.js";
import { $, count, element, seconds, share, stack } from "./dom.js";

const TIERS = ["device", "memory", "disk", "shared"];
const WINDOW = 30;
const looks = [];

export async function showFleet() {
  const now = { at: performance.now() / 1e3, ...(await read("/console/api/fleet")) };
  looks.push(now);
  if (looks.length > WINDOW) looks.shift();
  const before = looks[0];
  const span = Math.max(now.at - before.at, 1e-9);
  const rate = (name) => (looks.length > 1 ? (now.totals[name] - before.totals[name]) / span : 0);
  $("fleet-model").textContent = now.model;
  $("tiles").replaceChildren(...tiles(now, rate));
  $("cache").replaceChildren(cache(now));
  $("engines").replaceChildren(...now.engines.map(engine));
}

function tiles(now, rate) {
  const queued = Object.values(now.queued).reduce((sum, each) => sum + each, 0);
  const ready = now.engines.filter((each) => each.state === "ready").length;
  const desired = Math.max(0, ...Object.values(now.scaling.desired_replicas));
  const backlog = Math.max(0, ...Object.values(now.scaling.prefill_backlog_seconds).filter(Number.isFinite));
  const tile = (label, value, more) =>
    element("div", { class: "tile" }, element("span", { class: "quiet" }, label), element("b", {}, value), element("span", { class: "quiet" }, more ?? ""));
  return [
    tile("Engines ready", `${ready} of ${now.engines.length}`, desired ? `${desired} wanted` : ""),
    tile("In flight", count(now.in_flight), `${count(queued)} wait here`),
    tile("Requests", `${rate("requests").toFixed(1)}/s`, `${count(now.totals.requests)} in all`),
    tile("Output", `${count(rate("output_tokens"))} tok/s`, `${count(now.totals.output_tokens)} in all`),
    tile("Goodput", share(now.totals.goodput, now.totals.answered), "met both targets"),
    tile(`First token in ${now.targets.ttft_s} s`, share(now.within.ttft, now.totals.answered)),
    tile(`Tokens in ${1e3 * now.targets.tpot_s} ms`, share(now.within.tpot, now.within.tpot_of)),
    tile("Prefill backlog", seconds(backlog)),
  ];
}

function cache(now) {
  const whole = TIERS.reduce((sum, tier) => sum + (now.cached_tokens[tier] ?? 0), now.totals.computed_tokens);
  const parts = TIERS.map((tier) => [tier, now.cached_tokens[tier] ?? 0, `${tier} ${share(now.cached_tokens[tier] ?? 0, whole)}`]);
  parts.push(["computed", now.totals.computed_tokens, `computed ${share(now.totals.computed_tokens, whole)}`]);
  const speeds = Object.entries(now.tier_speeds).map(([tier, speed]) => `${tier} ${(speed / 1e9).toFixed(1)} GB/s`);
  return element(
    "div",
    { class: "card" },
    element("div", { class: "quiet" }, `Where ${count(whole)} prompt tokens were found`),
    stack(parts, whole),
    element("div", { class: "quiet" }, `Reads as measured or assumed: ${speeds.join(", ")}`),
  );
}

function engine(each) {
  const sum = (name) => each.ranks.reduce((total, rank) => total + rank[name], 0);
  const ready = each.state === "ready";
  const entry = (label, value) => [element("dt", {}, label), element("dd", {}, value)];
  const [held, total] = [sum("held_tokens"), sum("total_tokens")];
  const bar = stack([["device", held, `${share(held, total)} of ${count(total)} KV tokens held by running choices`]], total);
  return element(
    "article",
    { class: "card" },
    element("h3", {}, each.name, element("span", { class: ready ? "state" : "state bad" }, each.state)),
    element(
      "dl",
      {},
      ...entry("Role", each.role),
      ...entry("Running, waiting", `${sum("running")}, ${sum("waiting")}`),
      ...entry("Prompt tokens to compute", count(sum("queued_tokens"))),
      ...entry("Prefill", `${count(sum("prefill_speed"))} tok/s`),
      ...entry("Decode", `${count(sum("decode_speed"))} tok/s`),
      ...entry("Cache service", each.kv_cache ? "attached" : "none"),
    ),
    bar,
  );
}
