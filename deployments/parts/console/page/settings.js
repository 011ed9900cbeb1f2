// What a pane asks for beside the conversation: model, sampling, tools and the form of the answer.

import { h } from "./dom.js";

const NUMBERS = [
  ["temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", { min: 0, max: 1, step: 0.05 }],
  ["max_tokens", { min: 1, step: 1 }],
  ["seed", { step: 1 }],
];
const TOOLS = `[{
  "type": "function",
  "function": {
    "name": "look_up",
    "description": "Look a word up.",
    "parameters": {
      "type": "object",
      "properties": {"word": {"type": "string", "maxLength": 20}},
      "required": ["word"]
    }
  }
}]`;
const SCHEMA = `{
  "type": "object",
  "properties": {
    "word": {"enum": ["ocean", "lake", "river"]},
    "salty": {"type": "boolean"}
  },
  "required": ["word", "salty"],
  "additionalProperties": false
}`;

export class Settings {
  constructor() {
    this.model = h("select", { "aria-label": "Model" });
    this.modalities = {}; // that each model reads
    this.system = h("textarea", { rows: "2", placeholder: "none" });
    this.numbers = Object.fromEntries(NUMBERS.map(([name, limits]) => [
      name, h("input", { type: "number", inputmode: "decimal", placeholder: "default", ...stringsOf(limits) }),
    ]));
    this.tools = h("textarea", { rows: "3", placeholder: "a JSON list, as in the API", spellcheck: "false" });
    this.choice = h("select", {}, ...["auto", "required", "none"].map((name) => h("option", {}, name)));
    this.schema = h("textarea", { rows: "3", placeholder: "a JSON schema that the answer follows", spellcheck: "false" });
    this.logprobs = h("input", { type: "checkbox" });
    this.element = h(
      "details", { class: "settings" },
      h("summary", {}, "Settings"),
      h(
        "div", { class: "grid" },
        h("label", { class: "wide" }, "System message", this.system),
        ...NUMBERS.map(([name]) => h("label", {}, name.replace("_", " "), this.numbers[name])),
        h("label", { class: "wide" }, "Tools", this.tools),
        example("Example tool", () => { this.tools.value = TOOLS; }, h("label", {}, "tool choice", this.choice)),
        h("label", { class: "wide" }, "JSON schema", this.schema),
        example("Example schema", () => { this.schema.value = SCHEMA; }),
        h("label", { class: "check wide" }, this.logprobs, "Show how probable each token was")
      )
    );
  }

  // models: cards of /v1/models. The chosen model stays chosen if it still exists.
  setModels(models) {
    const chosen = this.model.value;
    this.modalities = Object.fromEntries(models.map((model) => [model.id, model.input_modalities]));
    this.model.replaceChildren(...models.map(({ id }) => h("option", { value: id }, id)));
    if (chosen in this.modalities) this.model.value = chosen;
  }

  reads(modality) {
    return this.modalities[this.model.value]?.includes(modality) ?? false;
  }

  // The body of a request, without `stream`. Throws an Error with a sentence for JSON that is none.
  body(messages) {
    const system = this.system.value.trim();
    const body = {
      model: this.model.value,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    };
    for (const [name, input] of Object.entries(this.numbers)) if (input.value !== "") body[name] = Number(input.value);
    if (this.tools.value.trim()) {
      body.tools = parse("Tools", this.tools.value);
      body.tool_choice = this.choice.value;
    }
    if (this.schema.value.trim()) {
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parse("JSON schema", this.schema.value) } };
    }
    if (this.logprobs.checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    return body;
  }
}

const stringsOf = (limits) => Object.fromEntries(Object.entries(limits).map(([name, value]) => [name, String(value)]));
const example = (text, onclick, ...beside) =>
  h("div", { class: "bar wide beside" }, ...beside, h("button", { class: "plain", type: "button", onclick }, text));

function parse(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
}
