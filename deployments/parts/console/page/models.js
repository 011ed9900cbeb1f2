// The models that are served, and what requests may call them.

import { getJson } from "./api.js";
import { h } from "./dom.js";
import { count } from "./format.js";

export class ModelsView {
  constructor() {
    this.cards = h("div", { class: "view" });
    this.element = h("div", { class: "view" }, h("h1", {}, "Models"), this.cards);
  }

  async open() {
    try {
      const { models } = await getJson("console/facts");
      this.cards.replaceChildren(...models.map(card));
    } catch (error) {
      this.cards.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message));
    }
  }
}

function card(model) {
  const sampling = Object.entries(model.default_sampling).map(([name, value]) => `${name} ${value}`);
  const rows = [
    ["also called", model.aliases.join(", ")],
    ["files", model.root],
    ["adapters", model.adapters.join(", ")],
    ["context", `${count(model.max_model_len)} tokens`],
    ["vocabulary", `${count(model.vocab_size)} tokens`],
    ["reads", model.input_modalities.join(", ")],
    ["tasks", model.generates ? "generates text" : "embeddings or scores"],
    ["sampling, where a request says nothing", sampling.join(" · ") || "none of its own"],
  ];
  return h(
    "section", { class: "card view" },
    h("h2", {}, model.name),
    h("dl", { class: "pairs" }, ...rows.filter(([, text]) => text).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]))
  );
}
