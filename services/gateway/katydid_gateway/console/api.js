// Calls to the gateway, with the key of the page's field. The key lives as long as the tab, and nowhere else.

import { $ } from "./dom.js";

const KEY = "katydid-key";

export function keepKey() {
  $("key").value = sessionStorage.getItem(KEY) ?? "";
  $("key").addEventListener("input", () => sessionStorage.setItem(KEY, $("key").value));
}

export async function call(path, { body, signal } = {}) {
  const headers = {};
  if ($("key").value) headers.authorization = `Bearer ${$("key").value}`;
  if (body) headers["content-type"] = "application/json";
  const method = body ? "POST" : "GET";
  const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  if (response.ok) return response;
  const failure = await response.json().catch(() => ({}));
  const error = new Error(failure.error?.message ?? `the gateway answered ${response.status}`);
  error.status = response.status;
  throw error;
}

export const read = async (path, options) => (await call(path, options)).json();

// Data of server-sent events, decoded, until the end mark.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}
