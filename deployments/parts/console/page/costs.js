// Costs of the last 24 hours: of keys, models, adapters and hours, and what engines spend their time on.

import { getJson } from "./api.js";
import { h } from "./dom.js";
import { count, duration, money, percent } from "./format.js";
import { sum } from "./rates.js";

const EVERY_MS = 10_000;
const seconds = (n) => (n ? duration(n) : "0 s");
const WASTED = ["preemption", "replay", "handoff"]; // lines that are Manta's fault, and that no client pays for
const LINES = { requests: "requests", wasted: "wasted by Manta", overhead: "overhead", stalled: "stalled", idle: "idle" };
const clock = new Intl.DateTimeFormat("en-GB", { weekday: "short", hour: "2-digit", minute: "2-digit" });

export class CostsView {
  constructor() {
    this.body = h("div", { class: "view" }, h("p", { class: "empty" }, "Asking all ingresses…"));
    this.element = h("div", { class: "view costs" },
      h("h1", {}, "Costs"), h("p", { class: "lead" }, "Of requests that ended in the last 24 hours, and of all engines."), this.body);
    this.askedAt = 0;
  }

  open() {
    return this.load();
  }

  update() {
    if (this.element.isConnected && Date.now() > this.askedAt + EVERY_MS) this.load();
  }

  async load() {
    this.askedAt = Date.now();
    try {
      this.body.replaceChildren(...draw(await getJson("console/costs")));
    } catch (error) {
      this.body.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message));
    }
  }
}

function draw({ currency, by_key, by_model, by_adapter, by_hour, engines }) {
  const used = (field) => sum(by_model, (row) => row.used[field]);
  const spent = together(engines.map((hour) => lines(hour.seconds)));
  const all = sum(Object.values(spent), (each) => each);
  const figure = (title, text) => h("div", { class: "figure" }, h("dt", {}, title), h("dd", {}, text));
  const share = (name) => (all ? percent(spent[name] / all) : "–");
  return [
    h("dl", { class: "figures card" },
      figure("Billed", money(used("cost"), currency)),
      figure("Engine time of requests", seconds(used("compute_s"))),
      figure("Saved by the prefix cache", `≈ ${seconds(sum(by_model, (row) => row.saved_s))}`),
      figure("Wasted by Manta", share("wasted")), figure("Overhead", share("overhead")), figure("Idle", share("idle"))),
    hours(by_hour, engines, currency),
    table("By key", "key", by_key, currency, "without a key"),
    table("By model", "model", by_model, currency, ""),
    table("By adapter", "adapter", by_adapter, currency, "without an adapter"),
  ];
}

// What engines have spent, with all that they have wasted on one line.
function lines(spent) {
  const { requests = 0, overhead = 0, stalled = 0, idle = 0 } = spent;
  return { requests, wasted: sum(WASTED, (line) => spent[line] ?? 0), overhead, stalled, idle };
}

const together = (spent) =>
  Object.fromEntries(Object.keys(LINES).map((name) => [name, sum(spent, (each) => each[name])]));

function hours(rows, engines, currency) {
  const billed = new Map(rows.map((row) => [Date.parse(row.name) / 1000, row]));
  const spent = new Map(engines.map((hour) => [hour.start, hour.seconds]));
  const starts = [...new Set([...billed.keys(), ...spent.keys()])].sort((a, b) => b - a);
  const body = starts.map((start) => {
    const { used, saved_s = 0 } = billed.get(start) ?? { used: {} };
    return h("tr", {},
      h("td", {}, clock.format(new Date(1000 * start))), h("td", {}, bar(spent.get(start) ?? {})),
      number(count(used.sequences ?? 0)), number(seconds(used.compute_s ?? 0)), number(seconds(saved_s)),
      number(money(used.cost ?? 0, currency)));
  });
  const legend = h("ul", { class: "legend" }, ...Object.entries(LINES).map(([name, text]) => h("li", { class: name }, text)));
  return card("By hour", ["hour", "engines", "requests", "engine time", "saved", "billed"], body, legend);
}

function bar(spent) {
  const parts = lines(spent);
  const all = sum(Object.values(parts), (part) => part);
  const text = Object.entries(parts).filter(([, part]) => part).map(([name, part]) => `${LINES[name]} ${duration(part)}`);
  const wasted = WASTED.filter((line) => spent[line]).map((line) => `${line} ${duration(spent[line])}`);
  const label = [...text, ...(wasted.length ? [`(${wasted.join(", ")})`] : [])].join(", ") || "no engine was seen";
  return h("div", { class: "spent", role: "img", "aria-label": label, title: label },
    ...Object.entries(parts).map(([name, part]) => h("i", { class: name, style: { width: `${all ? (100 * part) / all : 0}%` } })));
}

const number = (text) => h("td", { class: "number" }, text);

function table(title, kind, rows, currency, nameless) {
  const body = rows.map(({ name, used, saved_s }) => h("tr", {},
    h("td", {}, name || nameless), number(count(used.sequences)), number(count(used.prompt_tokens)), number(count(used.cached_tokens)),
    number(count(used.output_tokens)), number(seconds(used.compute_s)), number(seconds(used.wasted_s)), number(seconds(saved_s)),
    number(money(used.cost, currency))));
  return card(title, [kind, "requests", "prompt", "cached", "output", "engine time", "wasted", "saved", "billed"], body);
}

function card(title, columns, body, ...more) {
  const wide = new Set([columns[0], "engines"]);
  const heads = columns.map((name) => h("th", { scope: "col", class: wide.has(name) ? "" : "number" }, name));
  return h("section", { class: "card view" }, h("h2", {}, title),
    body.length ? h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, body)))
      : h("p", { class: "empty" }, "Nothing has ended yet."), ...more);
}
