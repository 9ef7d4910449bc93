// A request's phases as bars along its time, and what it cost in words.

import { count, element, seconds } from "./dom.js";

const TTFT_TARGET_S = 4;
const TPOT_TARGET_S = 0.05;
const KINDS = {
  ...Object.fromEntries(["receive", "tokenise", "prepare", "route", "deliver"].map((name) => [name, "text-work"])),
  ...Object.fromEntries(["admission", "retry", "queue"].map((name) => [name, "waiting"])),
  lookup: "fetch", fetch: "fetch", prefill: "prefill", decode: "decode",
};
const TIERS = ["device", "memory", "disk", "shared"];

export function waterfall(stretches) {
  const whole = Math.max(...stretches.map((bar) => bar.begin_s + bar.length_s), 1e-9);
  const rows = element("div", { class: "waterfall", role: "list", "aria-label": "Where the time went" });
  for (const { name, tier, begin_s, length_s } of stretches) {
    const bar = element("div", { class: `bar ${tier || KINDS[name] || ""}` });
    bar.style.left = `${(100 * begin_s) / whole}%`;
    bar.style.width = `${(100 * length_s) / whole}%`;
    rows.append(
      element("span", { role: "listitem" }, tier ? `${name} (${tier})` : name),
      element("div", { class: "track", "aria-hidden": "true" }, bar),
      element("span", { class: "time" }, seconds(length_s)),
    );
  }
  return rows;
}

export function figures(usage, ttft_s, tpot_s, engine) {
  const details = usage.prompt_tokens_details;
  const tiers = TIERS.filter((tier) => details.cached_tokens_by_tier[tier] > 0);
  const cached = tiers.map((tier) => `${count(details.cached_tokens_by_tier[tier])} ${tier}`).join(", ");
  const figure = (label, value, over = false) => element("span", { class: over ? "over" : "" }, `${label} `, element("b", {}, value));
  return element(
    "div",
    { class: "figures" },
    figure("TTFT", seconds(ttft_s), ttft_s > TTFT_TARGET_S),
    figure("TPOT", seconds(tpot_s || null), tpot_s > TPOT_TARGET_S),
    figure("prompt", count(usage.prompt_tokens)),
    figure("cached", cached || "0"),
    figure("output", count(usage.completion_tokens)),
    engine && figure("on", engine),
  );
}
