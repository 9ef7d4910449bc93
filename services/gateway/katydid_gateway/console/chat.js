// A conversation, streamed; each answer with what it took. Kept in this page alone.

import { call, events, read } from "./api.js";
import { $, element } from "./dom.js";
import { figures, waterfall } from "./waterfall.js";

let messages = [];
let running = null;

export const conversation = () => messages;

export function startChat() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  $("stop").addEventListener("click", stop);
  $("clear").addEventListener("click", () => {
    stop();
    messages = [];
    $("log").replaceChildren();
    $("prompt").focus();
  });
}

export const stop = () => running?.abort();

async function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  messages.push({ role: "user", content: text });
  show(element("div", { class: "message user" }, element("div", { class: "text" }, text)));
  running = new AbortController();
  busy(true);
  const answer = new Answer();
  try {
    await answer.stream(running.signal);
    messages.push({ role: "assistant", content: answer.text.textContent });
  } catch (error) {
    answer.failed(error.name === "AbortError" ? "stopped" : error.message);
    if (answer.text.textContent) messages.push({ role: "assistant", content: answer.text.textContent });
    else messages.pop();
  } finally {
    running = null;
    busy(false);
    $("prompt").focus();
  }
}

class Answer {
  constructor() {
    this.text = element("div", { class: "text" });
    this.thought = element("div", { class: "thought" });
    this.thinking = element("details", { hidden: true }, element("summary", {}, "Reasoning"), this.thought);
    this.box = element("div", { class: "message assistant" }, this.thinking, this.text);
    show(this.box);
  }

  async stream(signal) {
    const body = { model: "", messages, stream: true, stream_options: { include_usage: true } };
    body.max_tokens = Number($("max-tokens").value) || 512;
    if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
    const response = await call("/v1/chat/completions", { body, signal });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const { delta } of event.choices) this.add(delta);
      if (event.usage) this.account(event, response.headers.get("x-request-id"));
    }
  }

  add(delta) {
    const stay = following();
    if (delta.reasoning_content) {
      this.thinking.hidden = false;
      this.thought.append(delta.reasoning_content);
    }
    if (delta.content) this.text.append(delta.content);
    for (const part of delta.tool_calls ?? []) this.text.append(part.function?.name ?? "", part.function?.arguments ?? "");
    if (stay) scroll();
  }

  account({ usage, timing }, request) {
    const place = element("div");
    const details = element("details", {}, element("summary", {}, "Where the time went"), place);
    details.addEventListener("toggle", () => details.open && !place.firstChild && drawn(place, request), { once: true });
    this.box.append(figures(usage, timing.ttft_ms / 1e3, timing.tpot_ms / 1e3, timing.engine), details);
    scroll();
  }

  failed(why) {
    this.box.classList.add("failed");
    this.box.append(element("div", { class: "figures", role: "alert" }, why));
    scroll();
  }
}

// The gateway keeps a request's times once its answer has left, a moment after the page has it.
async function drawn(place, request) {
  for (let attempt = 0; ; attempt++) {
    try {
      const found = await read(`/console/api/requests/${encodeURIComponent(request)}`);
      place.replaceChildren(waterfall(found.stretches));
      scroll();
      return;
    } catch (error) {
      if (error.status !== 404 || attempt === 5) return place.replaceChildren(error.message);
      await new Promise((resolve) => setTimeout(resolve, 200));
    }
  }
}

function show(message) {
  $("log").append(message);
  scroll();
}

const following = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 40;
const scroll = () => ($("log").scrollTop = $("log").scrollHeight);

function busy(is) {
  $("send").disabled = is;
  $("stop").hidden = !is;
}
