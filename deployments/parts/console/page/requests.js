// The newest requests, and the timeline of one.

import { getJson } from "./api.js";
import { h, keep, setText } from "./dom.js";
import { count, duration, shortName, time } from "./format.js";

const COLUMNS = ["request", "model", "state", "prompt", "cached", "output", "first token", "total"];
const SPARE = new Set(["model", "cached", "first token", "total"]); // left out on a phone
const NUMBERS = new Set(["prompt", "cached", "output", "first token", "total"]);
const PHASES = ["admission", "queue", "prefill", "decode"];

export class RequestsView {
  constructor() {
    const heads = COLUMNS.map((name) => h("th", { class: classOf(name), scope: "col" }, name));
    this.rows = h("tbody", {});
    this.none = h("p", { class: "empty" }, "No request has come yet.");
    this.list = h(
      "div", { class: "view" },
      h("h1", {}, "Requests"),
      h("div", { class: "card scroll" }, h("table", { class: "requests" }, h("thead", {}, h("tr", {}, heads)), this.rows), this.none)
    );
    this.detail = h("div", { class: "view" });
    this.element = h("div", {}, this.list, this.detail);
  }

  async open(id) {
    this.shown = id;
    this.list.hidden = id !== "";
    this.detail.hidden = id === "";
    if (id === "") return;
    const back = h("a", { href: "#requests" }, "← all requests");
    this.detail.replaceChildren(back, h("p", { class: "empty" }, "Asking all ingresses…"));
    try {
      const { sequences } = await getJson(`debug/requests/${encodeURIComponent(id)}`);
      if (this.shown !== id) return; // another was opened meanwhile
      const again = h("button", { onclick: () => this.open(id) }, "Look again");
      this.detail.replaceChildren(h("div", { class: "bar" }, back, again), ...sequences.map(drawSequence));
    } catch (error) {
      if (this.shown !== id) return;
      this.detail.replaceChildren(back, h("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  update({ requests }) {
    this.none.hidden = requests.length > 0;
    keep(this.rows, requests, (request) => request.request_id, makeRow, updateRow);
  }
}

const classOf = (name) => [NUMBERS.has(name) && "number", SPARE.has(name) && "spare"].filter(Boolean).join(" ");

function makeRow(request) {
  const row = h("tr", {}, ...COLUMNS.map((name) => h("td", { class: classOf(name) })));
  row.children[0].append(h("a", { href: `#requests/${encodeURIComponent(request.request_id)}`, title: request.request_id }, request.request_id));
  row.children[2].append(h("span", { class: "state" }));
  return row;
}

function updateRow(row, request) {
  const [, model, state, prompt, cached, output, first, total] = row.children;
  setText(model, request.adapter || request.model);
  const bad = request.reason === "error" || request.reason === "refused";
  state.firstChild.className = `state ${bad ? "error" : request.state}`;
  const replays = request.replays ? `, ${request.replays} replay${request.replays > 1 ? "s" : ""}` : "";
  setText(state.firstChild, `${request.reason ?? request.state}${replays}`);
  setText(prompt, count(request.prompt_tokens));
  setText(cached, count(request.cached_tokens));
  setText(output, count(request.output_tokens));
  setText(first, duration(request.first_token_s));
  setText(total, duration(request.seconds));
}

function drawSequence(request) {
  return h(
    "section", { class: "view" },
    h("h1", { class: "mono" }, request.request_id),
    h("div", { class: "card timeline" }, drawTrack(request), drawLegend(request)),
    h("dl", { class: "card pairs" }, ...summary(request).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])),
    h("div", { class: "card" }, story(request)),
    ...[["Prompt", request.prompt], ["Output", request.output]].filter(([, text]) => text).map(([name, text]) =>
      h("section", { class: "card view" }, h("h2", {}, name), h("pre", {}, text)))
  );
}

// Start and end of each phase that was reached, in seconds since the request came.
function phases(request) {
  const end = request.seconds ?? Math.max(0, ...request.events.map((event) => event.at - request.arrived_at));
  const { admission_s, queue_s, prefill_s, first_token_s } = request;
  if (first_token_s === null) return { admission: [0, admission_s ?? end], queue: [admission_s ?? end, end] };
  const prefill = first_token_s - (prefill_s ?? 0);
  const queue = prefill - (queue_s ?? 0);
  return { admission: [0, queue], queue: [queue, prefill], prefill: [prefill, first_token_s], decode: [first_token_s, end] };
}

function drawTrack(request) {
  const found = phases(request);
  const end = Math.max(0.001, ...Object.values(found).map(([, to]) => to), ...request.events.map((e) => e.at - request.arrived_at));
  const place = (seconds) => `${Math.min(100, Math.max(0, (100 * seconds) / end))}%`;
  const bars = Object.entries(found).map(([name, [from, to]]) =>
    h("div", { class: `phase ${name}`, title: `${name}: ${duration(to - from)}`, style: { left: place(from), width: place(to - from) } })
  );
  const marks = request.events.map((event) => {
    const at = event.at - request.arrived_at;
    const bad = /failed|preempted|fails/.test(event.what);
    return h("div", { class: bad ? "mark bad" : "mark", title: `${duration(Math.max(0, at))}: ${event.what}`, style: { left: place(at) } });
  });
  return h("div", {}, h("div", { class: "track", "aria-hidden": "true" }, ...bars, ...marks),
    h("div", { class: "axis" }, h("span", {}, "0"), h("span", {}, duration(end))));
}

function drawLegend(request) {
  const found = phases(request);
  const texts = { admission: "on its way", queue: "queued", prefill: "prompt", decode: "generating" };
  return h("ul", { class: "legend" }, ...PHASES.filter((name) => name in found).map((name) =>
    h("li", { class: `phase-${name}` }, `${texts[name]} ${duration(found[name][1] - found[name][0])}`)));
}

function summary(request) {
  const rows = [
    ["model", request.model],
    ["adapter", request.adapter],
    ["came", time(request.arrived_at)],
    ["state", request.state === "ended" ? `ended after ${duration(request.seconds)}: ${request.reason}` : request.state],
    ["error", request.error],
    ["prompt", `${count(request.prompt_tokens)} tokens, ${count(request.cached_tokens)} of them from the prefix cache`],
    ["output", `${count(request.output_tokens)} tokens${pace(request)}`],
    ["replicas", request.engines.join(", ")],
    ["replays", request.replays || ""],
    ["preemptions", request.preemptions || ""],
  ];
  return rows.filter(([, text]) => text !== "" && text !== null).map(([name, text]) => [name, String(text)]);
}

function pace({ first_token_s, seconds, output_tokens }) {
  if (first_token_s === null) return "";
  const each = seconds !== null && output_tokens > 1 ? `, then one every ${duration((seconds - first_token_s) / (output_tokens - 1))}` : "";
  return `, the first after ${duration(first_token_s)}${each}`;
}

function story(request) {
  const rows = request.events.map((event) => {
    const at = event.at - request.arrived_at;
    return h("tr", {}, h("td", { class: "number" }, `${at < 0 ? "−" : "+"}${Math.abs(at).toFixed(3)}`),
      h("td", { class: "where", title: event.where }, shortName(event.where)), h("td", {}, event.what));
  });
  const heads = ["seconds", "where", "what happened"].map((name, i) => h("th", { scope: "col", class: i ? "" : "number" }, name));
  return h("table", { class: "story" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows));
}
