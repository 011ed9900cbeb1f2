// The cluster: pools, replicas, handoffs between them, and what happened lately.

import { sparkline } from "./charts.js";
import { h, keep, setText, svg } from "./dom.js";
import { bytes, count, duration, percent, rate, shortName, time } from "./format.js";
import { received, replicasOf, ROLES, sum } from "./rates.js";

const MAX_EVENTS = 30;

export class ClusterView {
  constructor() {
    this.models = h("div", { class: "view" }, h("p", { class: "empty" }, "Waiting for the first look at the cluster…"));
    this.events = h("ul", { class: "events" });
    this.quiet = h("p", { class: "empty" }, "Replicas that come and go, replays and scaling decisions appear here.");
    this.element = h(
      "div", { class: "view" },
      this.models,
      h("section", { class: "card" }, h("h2", {}, "Events"), this.quiet, this.events)
    );
    new ResizeObserver(() => this.drawArrows()).observe(this.models);
  }

  open() {
    requestAnimationFrame(() => this.drawArrows());
  }

  update(state, rates) {
    this.models.querySelector(".empty")?.remove();
    this.state = state;
    this.rates = rates;
    keep(this.models, state.models, (model) => model.model, makeModel, (element, model) =>
      updateModel(element, model, state, rates)
    );
    this.drawArrows();
    const events = [...state.events, ...state.scaling.map((change) => ({ ...change, kind: "scaling" }))];
    events.sort((a, b) => b.at - a.at);
    this.quiet.hidden = events.length > 0;
    keep(this.events, events.slice(0, MAX_EVENTS), (e) => `${e.kind} ${e.at} ${e.name ?? e.pool}`, makeEvent, () => {});
  }

  drawArrows() {
    for (const model of this.state?.models ?? []) {
      const element = [...this.models.children].find((child) => child.dataset.key === model.model);
      if (element && model.prefill.length) drawHandoffs(element.querySelector(".pools"), model, this.rates);
    }
  }
}

function makeModel({ model }) {
  const figure = (name, title, unit) =>
    h("div", { class: "figure" }, h("dt", {}, title), h("dd", {}, h("span", { "data-figure": name }, "–"), unit && h("small", {}, unit)));
  return h(
    "section", { class: "view model" },
    h("h1", {}, model),
    h(
      "dl", { class: "figures card" },
      figure("output", "Tokens out", "per s"),
      figure("input", "Prompt tokens computed", "per s"),
      figure("running", "Running", ""),
      figure("waiting", "Waiting", ""),
      figure("hits", "Prefix cache hits", ""),
      h("div", { class: "figure", "data-figure": "chart" })
    ),
    h(
      "div", { class: "pools" },
      ...ROLES.map((role) =>
        h("div", { class: "pool", "data-role": role }, h("h2", {}, ""), h("div", { class: "replicas" }))
      ),
      svg(
        "svg", { class: "arrows", "aria-hidden": "true" },
        svg("defs", {}, marker("arrow", "head"), marker("arrow-active", "head active")),
        svg("g", {})
      )
    )
  );
}

function updateModel(element, model, state, rates) {
  const { decode } = model;
  const all = replicasOf(model);
  const set = (name, text) => setText(element.querySelector(`[data-figure="${name}"]`), text);
  const queried = sum(decode, (r) => r.stats.prefix_queried_tokens);
  set("output", rate(sum(decode, (r) => rates.of(r).output)));
  set("input", rate(sum(all, (r) => rates.of(r).input)));
  set("running", count(sum(decode, (r) => r.stats.running)));
  set("waiting", count(state.waiting[model.model] + sum(decode, (r) => r.stats.waiting)));
  set("hits", queried ? percent(sum(decode, (r) => r.stats.prefix_hit_tokens) / queried) : "–");
  element.querySelector('[data-figure="chart"]').replaceChildren(
    h("dt", {}, "Tokens out, last minutes"), h("dd", {}, sparkline(rates.history.get(model.model) ?? []))
  );
  const pools = element.querySelector(".pools");
  pools.classList.toggle("one", !model.prefill.length);
  for (const role of ROLES) {
    const pool = pools.querySelector(`[data-role="${role}"]`);
    const replicas = model[role];
    pool.hidden = role !== "decode" && !replicas.length;
    setText(pool.querySelector("h2"), poolTitle(role, replicas, model));
    keep(pool.querySelector(".replicas"), replicas, (r) => r.engine_id, makeReplica, (card, replica) =>
      updateReplica(card, replica, rates.of(replica), role)
    );
  }
}

function poolTitle(role, replicas, { asleep, prefill }) {
  if (asleep) return "Asleep: the next request starts a replica";
  const groups = new Set(replicas.map((r) => r.engine_id.replace(/\.dp\d+$/, ""))); // engines that share experts
  const each = replicas.length > groups.size ? ` with ${replicas.length} engines` : "";
  const number = `${groups.size} replica${groups.size === 1 ? "" : "s"}${each}`;
  if (role !== "decode") return `${role === "encode" ? "Encode" : "Prefill"}: ${number}`;
  return prefill.length ? `Decode: ${number}` : `${number} for prefill and decode`;
}

function makeReplica(replica) {
  const fact = (name, title) => h("div", {}, h("dt", {}, title), h("dd", { "data-fact": name }, "–"));
  return h(
    "article", { class: "card replica" },
    h("header", {}, h("span", { class: "id", title: replica.engine_id }, shortName(replica.engine_id)), h("span", { class: "muted", "data-fact": "age" })),
    h(
      "dl", { class: "facts" },
      fact("running", "running"), fact("waiting", "waiting"), fact("tokens", "tokens/s"),
      fact("steps", "steps/s"), fact("cost", "step costs"), fact("hits", "prefix hits"),
      fact("holds", "holds"), fact("moved", "moved in, out")
    ),
    h("ol", { class: "shared", hidden: "" },
      h("li", {}, h("span", {}, "steps with the other engines"), h("div", { class: "ranks" }, h("i", {}, h("b", {}))),
        h("span", { class: "muted", "data-fact": "own" }, "–"))),
    h("ol", { class: "stages", hidden: "" }),
    h("ol", { class: "experts", hidden: "" }),
    h("div", {},
      h("div", { class: "blocks", role: "img" }, h("i", { class: "used" }), h("i", { class: "cached" })),
      h("ul", { class: "legend" }, ...["used", "cached", "free"].map((name) => h("li", { class: name, "data-fact": name }))))
  );
}

function updateReplica(card, { stats, last_step_age_s }, rates, role) {
  const set = (name, text) => setText(card.querySelector(`[data-fact="${name}"]`), text);
  const decodes = role === "decode";
  set("running", count(stats.running));
  set("waiting", count(stats.waiting + stats.receiving));
  set("tokens", rate(decodes ? rates.output : rates.input));
  set("steps", rate(rates.steps));
  set("cost", decodes ? duration(stats.decode_seconds_per_step || null) : duration(stats.prompt_seconds_per_token || null));
  set("hits", stats.prefix_queried_tokens ? percent(rates.hits ?? stats.prefix_hit_tokens / stats.prefix_queried_tokens) : "–");
  const kept = stats.parts.holds, moves = stats.parts.handoffs?.moves ?? {};
  set("holds", kept?.holds ? `${count(kept.holds)} of ${count(kept.blocks)} blocks` : "–");
  const moved = (...outcomes) => count(sum(outcomes, (outcome) => moves[outcome] ?? 0));
  set("moved", Object.keys(moves).length ? `${moved("received", "failed")}, ${moved("released", "cancelled", "expired")}` : "–");
  const { shared_experts: together, stages: { stages: stageStats = [] } = {}, experts: { stages: expertStats = [] } = {} } = stats.parts;
  const { generation: lost = 0, engines = 0 } = together ?? {};
  const left = lost ? `${count(engines)} of ${count(engines + lost)} engines left` : "";
  set("age", last_step_age_s > 1 ? `no step for ${duration(last_step_age_s)}` : left);
  setText(card.querySelector('[data-fact="cost"]').previousSibling, decodes ? "step costs" : "token costs");
  for (const [name, blocks] of [["used", stats.blocks_used], ["cached", stats.blocks_cached], ["free", stats.blocks_free]]) {
    set(name, `${count(blocks)} ${name}`);
    card.querySelector(`.blocks .${name}`)?.style.setProperty("width", `${(100 * blocks) / stats.blocks_total}%`);
  }
  const shared = card.querySelector(".shared");
  shared.hidden = !together;
  if (together) {
    const { own, served } = together.steps;
    const share = rates.own ?? own / (own + served || 1);
    set("own", `${percent(share)} its own`);
    shared.querySelector("b").style.setProperty("width", `${100 * share}%`);
  }
  const stages = card.querySelector(".stages");
  stages.hidden = !stageStats.length;
  keep(stages, stageStats.map((stage, number) => ({ ...stage, number })), (stage) => String(stage.number), makeStage,
    (element, stage) => updateStage(element, stage, rates.stages[stage.number]));
  const experts = card.querySelector(".experts");
  experts.hidden = !expertStats.length;
  keep(experts, expertStats, ({ stage }) => String(stage), makeExperts, updateExperts);
  card.querySelector(".blocks").setAttribute("aria-label",
    `KV blocks: ${stats.blocks_used} used, ${stats.blocks_cached} cached, ${stats.blocks_free} free`);
  const holds = kept?.holds ? [`${count(kept.holds)} holds keep ${count(kept.blocks)} blocks, ${count(kept.device_blocks)} of them here`] : [];
  card.querySelector(".blocks").title = holds.concat(Object.entries(stats.group_blocks)
    .map(([group, { used, cached, free }]) => {
      const held = bytes((used + cached) * (stats.group_block_bytes[group] ?? 0));
      const name = group === "states" ? "snapshots of states" : `group ${group}`;
      return `${name}: ${used} used, ${cached} cached, ${free} free; ${held} held on each rank`;
    })).join("\n");
}

function makeStage({ number, layers, ranks }) {
  const drawn = Array.from({ length: ranks }, () => h("i", {}, h("b", {})));
  const named = `stage ${number}: ${count(layers)} layers`;
  return h("li", { title: `${named} on ${count(ranks)} rank${ranks === 1 ? "" : "s"}` },
    h("span", {}, named), h("div", { class: "ranks" }, ...drawn), h("span", { class: "muted", "data-fact": "busy" }, "–"));
}

function updateStage(element, { busy_s, wait_s }, lately) {
  const share = lately ?? busy_s / (busy_s + wait_s || 1);
  setText(element.querySelector('[data-fact="busy"]'), `computes ${percent(share)}`);
  for (const filled of element.querySelectorAll("b")) filled.style.setProperty("width", `${100 * share}%`);
}

function makeExperts({ stage, rank_tokens }) {
  const drawn = rank_tokens.map((_, rank) => h("i", { title: `rank ${rank}` }, h("b", {})));
  return h("li", {}, h("span", {}, `experts${stage ? `, stage ${stage}` : ""}`), h("div", { class: "ranks" }, ...drawn),
    h("span", { class: "muted", "data-fact": "balanced" }, "–"));
}

function updateExperts(element, { rank_tokens, balancedness, top, moved }) {
  setText(element.querySelector('[data-fact="balanced"]'), `balanced ${percent(balancedness)}, ${count(moved)} moved`);
  const most = Math.max(1, ...rank_tokens);
  element.querySelectorAll("b").forEach((filled, rank) => filled.style.setProperty("width", `${(100 * rank_tokens[rank]) / most}%`));
  element.title = top.map(([layer, expert, share]) => `layer ${layer}, expert ${expert}: ${percent(share)} of the layer's load`).join("\n");
}

const marker = (id, name) =>
  svg("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
    svg("path", { d: "M0 0 L8 4 L0 8 z", class: name }));

function drawHandoffs(pools, model, rates) {
  const frame = pools.getBoundingClientRect();
  const arrows = pools.querySelector(".arrows > g");
  if (!frame.width) return;
  const box = (replica) => {
    const card = [...pools.querySelectorAll(".replica")].find((one) => one.dataset.key === replica.engine_id);
    const { left, top, right, bottom } = card.getBoundingClientRect();
    return { left: left - frame.left, top: top - frame.top, right: right - frame.left, bottom: bottom - frame.top };
  };
  const drawn = model.prefill.flatMap((prefill) => model.decode.map((decode) => {
    const live = decode.live_handoffs.filter((handoff) => handoff.peer === prefill.engine_id);
    // a handoff that ended between two looks has no peer any more: with several prefill replicas it is any of them
    const ended = model.prefill.length === 1 ? rates.of(decode).handoffs : 0;
    const text = live.length ? `${live.length} under way, ${bytes(sum(live, (handoff) => handoff.num_bytes))}`
      : ended ? `${ended} handed over`
        : model.prefill.length === 1 && received(decode) ? `${count(received(decode))} so far` : "";
    return draw(box(prefill), box(decode), live.length + ended > 0, text);
  }));
  arrows.replaceChildren(...drawn.flat());
}

function draw(from, to, active, text) {
  const beside = to.left > from.right;
  const [x1, y1] = beside ? [from.right, (from.top + from.bottom) / 2] : [(from.left + from.right) / 2, from.bottom];
  const [x2, y2] = beside ? [to.left, (to.top + to.bottom) / 2] : [(to.left + to.right) / 2, to.top];
  const bend = beside ? `C ${(x1 + x2) / 2} ${y1}, ${(x1 + x2) / 2} ${y2}` : `C ${x1} ${(y1 + y2) / 2}, ${x2} ${(y1 + y2) / 2}`;
  const label = svg("text", beside ? { x: (x1 + x2) / 2, y: (y1 + y2) / 2 - 10 } : { x: x1 + 70, y: (y1 + y2) / 2 + 4 });
  label.textContent = text;
  return [svg("path", { class: active ? "handoff active" : "handoff", d: `M ${x1} ${y1} ${bend}, ${x2} ${y2}` }), label];
}

function makeEvent(event) {
  return h("li", { class: event.kind }, h("time", {}, time(event.at)), h("div", {}, tell(event)));
}

function tell(event) {
  switch (event.kind) {
    case "up":
      return [h("strong", {}, "A replica is up"), ": ", h("code", {}, event.name)];
    case "gone":
      return [h("strong", {}, "A replica is gone"), ": ", h("code", {}, event.name)];
    case "replay":
      return [h("strong", {}, "A request continues in another replica"), ": ", h("a", { class: "mono", href: `#requests/${encodeURIComponent(event.name)}` }, event.name)];
    default: {
      const inputs = Object.entries(event.inputs).map(([name, value]) => `${name} ${rate(value) === "0" ? Number(value.toPrecision(2)) : rate(value)}`);
      return [
        h("strong", {}, `${event.pool} pool of ${event.model} from ${event.before} to ${event.after} replicas`),
        `: ${event.reason}, the load asks for ${event.desired}`,
        event.saved_per_hour ? `; ${event.cost_per_hour.toFixed(2)} per hour, ${Math.abs(event.saved_per_hour).toFixed(2)} ${event.saved_per_hour > 0 ? "less" : "more"}` : "",
        h("details", {}, h("summary", {}, "the figures that decided"), inputs.join(" · ")),
      ];
    }
  }
}
