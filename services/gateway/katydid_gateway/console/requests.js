// The last requests of this key's tenant, each with its waterfall.

import { read } from "./api.js";
import { $, element } from "./dom.js";
import { figures, waterfall } from "./waterfall.js";

let shown = "";

export async function showRequests() {
  const { requests } = await read("/console/api/requests");
  const ids = requests.map(({ id }) => id).join();
  // What has focus or is selected stays so while nothing new has come.
  if (ids === shown) return;
  shown = ids;
  const open = new Set([...document.querySelectorAll("#requests details[open]")].map((each) => each.dataset.id));
  $("requests").replaceChildren(...requests.map((request) => row(request, open.has(request.id))));
  if (!requests.length) $("requests").append(element("p", { class: "quiet" }, "None yet."));
}

function row(request, open) {
  const at = new Date(request.received_ms).toLocaleTimeString();
  const state = element("span", { class: request.outcome === "ok" ? "state" : "state bad" }, request.outcome);
  const details = element(
    "details",
    { open, "data-id": request.id },
    element("summary", {}, `Where the time went${request.trace_id ? `; trace ${request.trace_id}` : ""}`),
    waterfall(request.stretches),
  );
  return element(
    "article",
    { class: "card" },
    element("h3", {}, `${at}  ${request.api}`, state),
    figures(request.usage, request.ttft_s, request.tpot_s, request.engine),
    details,
  );
}
