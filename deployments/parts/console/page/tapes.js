// Tapes: what the scheduler of an engine, and the routers, looked like at any moment.

import { getJson } from "./api.js";
import { h } from "./dom.js";
import { bytes, count, duration, time } from "./format.js";
import { sum } from "./rates.js";

const SHOWN = 200; // rows of a table
const STEPS = [["−100", -100], ["−1", -1], ["+1", 1], ["+100", 100]];

export class TapesView {
  constructor() {
    this.list = h("ul", { class: "tapes" });
    this.body = h("div", { class: "view", "aria-live": "polite" });
    this.element = h("div", { class: "view" }, h("h1", {}, "Tapes"),
      h("p", { class: "lead" }, "Every decision of the schedulers, made again (engine.tape_mib)."), this.list, this.body);
    this.asked = 0;
  }

  open(name) {
    if (name) return this.look(name, {});
    return this.show(this.list, async () => {
      const { tapes } = await getJson("console/tapes");
      const rows = tapes.map(({ name, size, written_at }) =>
        h("li", {}, h("a", { class: "mono", href: `#tapes/${encodeURIComponent(name)}` }, name), ` ${time(written_at)}, ${bytes(size)}`));
      return [h("li", {}, h("a", { href: `#tapes/now-${Date.now()}` }, "What all engines have now")), ...rows];
    });
  }

  // question: engine, and seconds or position
  look(name, question) {
    const asked = ++this.asked; // an answer that comes after a later question is not shown
    const query = new URLSearchParams(question);
    return this.show(this.body, async () => {
      const answer = await getJson(`console/tapes/${encodeURIComponent(name)}?${query}`);
      return asked === this.asked ? this.draw(name, answer) : [...this.body.children];
    });
  }

  async show(place, load) {
    place.setAttribute("aria-busy", "true");
    try {
      place.replaceChildren(...(await load()));
    } catch (error) {
      place.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message));
    } finally {
      place.removeAttribute("aria-busy");
    }
  }

  draw(name, { engines, engine, reason, moment, choices, problem }) {
    const choose = h("select", { "aria-label": "engine", onchange: () => this.look(name, { engine: choose.value }) },
      ...engines.map((each) => h("option", { value: each, selected: each === engine }, each)));
    const why = [reason, problem].filter(Boolean).map((text) => h("p", { class: "problem" }, text));
    if (!moment) return [choose, ...why];
    const go = (position) => this.look(name, { engine, position: Math.max(0, Math.min(moment.moments, position)) });
    const place = h("input", { type: "range", min: "0", max: String(moment.moments), value: String(moment.position),
      "aria-label": "moment", onchange: () => go(Number(place.value)) });
    const seconds = h("input", { type: "number", step: "any", value: moment.seconds.toFixed(3), "aria-label": "seconds from the start",
      onchange: () => this.look(name, { engine, seconds: seconds.value }) });
    return [
      h("div", { class: "card view" }, choose, ...why, place,
        h("div", { class: "actions" }, ...STEPS.map(([text, by]) => h("button", { type: "button", onclick: () => go(moment.position + by) }, text)),
          h("label", {}, seconds, " s")),
        h("p", {}, `#${count(moment.position)} of ${count(moment.moments)}, ${time(moment.at)}: ${moment.what}`),
        h("p", {}, `${count(moment.planned)} steps planned and not ended, ${count(moment.preemptions)} preemptions`)),
      table("Blocks", moment.blocks),
      ...Object.entries(moment.requests).map(([title, rows]) => table(`${title}: ${count(rows.length)}`, rows)),
      moment.step ? table(`Step ${count(moment.step)}: ${count(sum(moment.batch, (row) => row.end - row.start))} tokens`, moment.batch) : undefined,
      ...choices.map(drawChoice),
    ].filter(Boolean);
  }
}

function drawChoice({ router, pool, seconds_ago, choice }) {
  const rows = choice.ranked.map((engine) => ({ engine, ...choice.known[engine] }));
  return table(`${router} to ${pool}, ${duration(seconds_ago)} before: ${choice.request_id} (${choice.reason}, ` +
    `${count(choice.cached_tokens)} of ${count(choice.num_tokens)} tokens cached)`, rows);
}

// Rows are objects with the same fields, which name the columns.
function table(title, rows) {
  const columns = [...new Set(rows.flatMap(Object.keys))];
  const isText = (name) => rows.some((row) => typeof row[name] === "string");
  const text = (value) => (value === true ? "yes" : value === false ? "no" : typeof value === "number" ? count(value) : value ?? "–");
  const heads = columns.map((name) => h("th", { scope: "col", class: isText(name) ? "" : "number" }, name.replaceAll("_", " ")));
  const body = rows.slice(0, SHOWN).map((row) => h("tr", {},
    ...columns.map((name) => h("td", { class: isText(name) ? "mono" : "number" }, text(row[name])))));
  const more = rows.length > SHOWN ? h("p", { class: "empty" }, `and ${count(rows.length - SHOWN)} more`) : undefined;
  return h("section", { class: "card view" }, h("h2", {}, title),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, body))), more);
}
