// Sessions of the API key, and one of them as a line of turns.

import { getJson } from "./api.js";
import { h } from "./dom.js";
import { count, duration, percent, shortName, time } from "./format.js";

const COLUMNS = ["session", "used", "turns", "prompt", "cached", "output", "engine time", "left"];
const NUMBERS = new Set(COLUMNS.slice(2));
const TURN_COLUMNS = ["began", "turn", "session", "waited", "first token", "prompt", "cached", "output", "engine time", "replica", "ended"];
const TURN_NUMBERS = new Set(["waited", "first token", "prompt", "cached", "output", "engine time"]);

export class SessionsView {
  constructor() {
    this.body = h("div", { class: "view" });
    this.element = h("div", { class: "view sessions" }, this.body);
  }

  async open(id) {
    this.shown = id;
    const back = id === "" ? null : h("a", { href: "#sessions" }, "← all sessions");
    try {
      const found = await getJson(id === "" ? "v1/sessions?limit=100" : `v1/sessions/${encodeURIComponent(id)}`);
      if (this.shown !== id) return; // another was opened meanwhile
      const again = h("button", { onclick: () => this.open(id) }, "Look again");
      const drawn = id === "" ? list(found.data) : drawSession(found);
      this.body.replaceChildren(h("div", { class: "bar" }, ...(back ? [back] : []), again), ...drawn);
    } catch (error) {
      if (this.shown !== id) return;
      this.body.replaceChildren(...(back ? [back] : []), h("p", { class: "problem", role: "alert" }, error.message));
    }
  }
}

const link = (id) => h("a", { class: "mono", href: `#sessions/${encodeURIComponent(id)}`, title: id }, id);
const number = (text) => h("td", { class: "number" }, text);
const hit = ({ prompt_tokens, cached_tokens }) => (prompt_tokens ? percent(cached_tokens / prompt_tokens) : "–");

function left({ remaining_tokens, remaining_budget }) {
  const tokens = remaining_tokens === null ? [] : [`${count(remaining_tokens)} tokens`];
  return [...tokens, ...(remaining_budget === null ? [] : [remaining_budget.toPrecision(3)])].join(", ") || "–";
}

function list(sessions) {
  const rows = sessions.map((session) => h("tr", {}, h("td", {}, link(session.id)), h("td", {}, time(session.used_at)),
    number(count(session.usage.turns)), number(count(session.usage.prompt_tokens)), number(hit(session.usage)),
    number(count(session.usage.output_tokens)), number(duration(session.usage.compute_seconds)), number(left(session))));
  return [h("h1", {}, "Sessions"), table(COLUMNS, NUMBERS, rows, "No request of this key has named a session.")];
}

function drawSession(session) {
  const { usage } = session;
  const facts = [
    ["parent", session.parent === null ? null : link(session.parent)],
    ["children", session.children.length ? h("span", {}, ...session.children.flatMap((id) => [link(id), " "])) : null],
    ["turns", count(usage.turns)],
    ["prompts", `${count(usage.prompt_tokens)} tokens, ${hit(usage)} of them cached`],
    ["output", `${count(usage.output_tokens)} tokens`],
    ["engine time", duration(usage.compute_seconds)],
    ["price", usage.cost ? usage.cost.toPrecision(6) : null],
    ["left of the budget", left(session) === "–" ? null : left(session)],
  ];
  const rows = session.turns.map((turn) => h("tr", {}, h("td", {}, time(turn.began_at)),
    h("td", {}, h("a", { class: "mono", href: `#requests/${encodeURIComponent(turn.id)}` }, turn.id)), h("td", {}, turn.session),
    number(duration(turn.wait_s)), number(duration(turn.first_token_s)), number(count(turn.prompt_tokens)), number(hit(turn)),
    number(count(turn.output_tokens)), number(duration(turn.compute_seconds)), h("td", {}, turn.engines.map(shortName).join(", ")),
    h("td", {}, turn.finish_reason ?? "runs")));
  return [
    h("h1", { class: "mono" }, session.id),
    h("div", { class: "card" }, line(session.turns)),
    h("dl", { class: "card pairs" }, ...facts.filter(([, shown]) => shown).flatMap(([name, shown]) => [h("dt", {}, name), h("dd", {}, shown)])),
    table(TURN_COLUMNS, TURN_NUMBERS, rows, "It has had no turn yet."),
  ];
}

// A block for each turn: as wide as it took long, and as full as its prompt was cached.
function line(turns) {
  const total = turns.reduce((sum, turn) => sum + (turn.seconds ?? 0), 0) || 1;
  const blocks = turns.map((turn) => {
    const told = `${turn.finish_reason ?? "runs"}: ${duration(turn.seconds)}, ${hit(turn)} cached, ${turn.engines.map(shortName).join(", ")}`;
    const bad = ["error", "lost", "budget"].includes(turn.finish_reason);
    const full = turn.prompt_tokens ? turn.cached_tokens / turn.prompt_tokens : 0;
    return h("i", { class: bad ? "bad" : "", title: told, style: { "flex-grow": String(0.02 + (turn.seconds ?? 0) / total) } },
      h("b", { style: { height: `${100 * full}%` } }));
  });
  return h("div", { class: "turns", role: "img", "aria-label": `${turns.length} turns` }, ...blocks);
}

function table(columns, numbers, rows, nothing) {
  const heads = columns.map((name) => h("th", { scope: "col", class: numbers.has(name) ? "number" : "" }, name));
  return h("div", { class: "card scroll" },
    rows.length ? h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows)) : h("p", { class: "empty" }, nothing));
}
