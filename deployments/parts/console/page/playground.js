// The playground: one conversation, or two side by side that get the same messages.

import { getJson } from "./api.js";
import { h } from "./dom.js";
import { Images, imagesOf } from "./images.js";
import { Pane } from "./pane.js";

const EXAMPLES = ["What is an ocean?", "What does brave mean?", "Name a kind of tree."];

export class PlaygroundView {
  constructor() {
    this.panes = [new Pane(() => this.refresh()), new Pane(() => this.refresh())];
    this.compare = h("button", { "aria-pressed": "false", onclick: () => this.setTwo(!this.two) }, "Side by side");
    this.problem = h("p", { class: "problem", role: "alert" });
    this.images = new Images((problem) => { this.problem.textContent = problem; });
    this.input = h("textarea", {
      rows: "1", placeholder: "Message", "aria-label": "Message",
      onkeydown: (event) => this.onKey(event), onpaste: (event) => this.onImages(event, event.clipboardData),
    });
    this.button = h("button", { class: "primary", onclick: () => (this.busy ? this.stop() : this.submit()) }, "Send");
    this.examples = h("div", { class: "examples" }, ...EXAMPLES.map((text) => h("button", { onclick: () => this.send(text) }, text)));
    this.grid = h("div", { class: "panes" }, ...this.panes.map((pane) => pane.element));
    this.element = h(
      "div", { class: "view" },
      h("div", { class: "bar" }, h("h1", {}, "Playground"),
        this.compare, h("button", { onclick: () => this.clear() }, "New conversation")),
      this.problem, this.grid, this.examples,
      h("div", {
        class: "composer",
        ondragover: (event) => event.preventDefault(), // so that a drop comes
        ondrop: (event) => this.onImages(event, event.dataTransfer),
      }, this.images.element, this.images.button, this.images.file, this.input, this.button)
    );
    for (const pane of this.panes) pane.settings.model.addEventListener("change", () => this.refresh());
    this.setTwo(false);
  }

  async open() {
    try {
      const { data } = await getJson("v1/models");
      for (const pane of this.panes) pane.settings.setModels(data);
      this.refresh();
      this.problem.textContent = "";
    } catch (error) {
      this.problem.textContent = error.message;
    }
  }

  get shown() {
    return this.two ? this.panes : this.panes.slice(0, 1);
  }

  setTwo(two) {
    this.two = two;
    this.grid.classList.toggle("two", two);
    this.panes[1].element.hidden = !two;
    this.compare.setAttribute("aria-pressed", String(two));
    this.refresh();
  }

  // Take what is pasted or dropped, if those are images.
  onImages(event, transfer) {
    const files = imagesOf(transfer);
    if (!files.length) return;
    event.preventDefault();
    if (this.reads("image")) this.images.add(files);
    else this.problem.textContent = "This model reads no images.";
  }

  reads(modality) {
    return this.shown.every((pane) => pane.settings.reads(modality));
  }

  onKey(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.submit();
    } else if (event.key === "Escape") {
      this.stop();
    }
  }

  submit() {
    const text = this.input.value.trim();
    if (this.busy || !(text || this.images.urls.length)) return; // what was typed meanwhile stays until the answer is there
    this.input.value = "";
    this.send(text, this.images.take());
  }

  stop() {
    for (const pane of this.shown) pane.answering?.abort();
  }

  send(text, images = []) {
    if (this.busy) return;
    this.examples.hidden = true;
    for (const pane of this.shown) {
      pane.settings.element.open = false; // the answer is to be seen
      pane.send(text, images);
    }
    this.input.focus();
  }

  clear() {
    for (const pane of this.panes) pane.clear();
    this.images.take();
    this.examples.hidden = false;
    this.input.focus();
  }

  get busy() {
    return this.shown.some((pane) => pane.answering);
  }

  refresh() {
    this.button.textContent = this.busy ? "Stop" : "Send";
    this.images.button.hidden = !this.reads("image");
  }
}
