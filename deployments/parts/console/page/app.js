// The page: its views, which one is shown, and what all of them are told.

import { forgetKey, hasKey } from "./api.js";
import { ClusterView } from "./cluster.js";
import { ConfigurationView } from "./configuration.js";
import { CostsView } from "./costs.js";
import { h, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { count, rate } from "./format.js";
import { ModelsView } from "./models.js";
import { PlaygroundView } from "./playground.js";
import { allReplicas, Rates, sum } from "./rates.js";
import { RequestsView } from "./requests.js";
import { SessionsView } from "./sessions.js";

const views = {
  playground: new PlaygroundView(),
  cluster: new ClusterView(),
  requests: new RequestsView(),
  sessions: new SessionsView(),
  costs: new CostsView(),
  models: new ModelsView(),
  configuration: new ConfigurationView(),
};
const main = document.getElementById("main");
const tabs = document.getElementById("tabs");
const pulse = document.getElementById("pulse");
const forget = document.getElementById("forget");
const rates = new Rates();

function show() {
  const [, name, rest] = /^#([^/]*)\/?(.*)$/.exec(location.hash) ?? [];
  const shown = Object.hasOwn(views, name ?? "") ? name : "playground";
  for (const tab of tabs.children) {
    if (tab.dataset.view === shown) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  document.title = `Manta · ${shown}`;
  main.replaceChildren(views[shown].element);
  views[shown].open?.(decodeURIComponent(rest ?? ""));
}

function onState(state) {
  rates.add(state);
  const replicas = allReplicas(state);
  const running = sum(replicas, (replica) => replica.stats.running);
  const output = sum(replicas, (replica) => rates.of(replica).output);
  pulse.className = "live";
  pulse.removeAttribute("role"); // nobody wants to hear the rate every two seconds
  pulse.title = "";
  forget.hidden = !hasKey();
  setText(pulse, `${count(running)} running · ${rate(output)} tokens/s`);
  for (const view of Object.values(views)) view.update?.(state, rates);
}

function onLost(error) {
  pulse.className = "lost";
  pulse.setAttribute("role", "alert");
  setText(pulse, "the server does not answer");
  pulse.title = error.message;
}

tabs.append(
  ...Object.keys(views).map((name) => h("a", { href: `#${name}`, "data-view": name }, name[0].toUpperCase() + name.slice(1)))
);
window.addEventListener("hashchange", show);
window.addEventListener("keydown", (event) => {
  const name = Object.keys(views)[Number(/^Digit(\d)$/.exec(event.code)?.[1]) - 1]; // its `key` is a sign on some keyboards
  if (!event.altKey || event.ctrlKey || name === undefined) return; // Ctrl and Alt are how some keyboards type a bracket
  event.preventDefault();
  location.hash = `#${name}`;
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash names the view
  main.focus();
});
forget.addEventListener("click", () => {
  forgetKey();
  location.reload();
});
show();
new Feed(onState, onLost);
