// One conversation with one model.

import { Answer } from "./answer.js";
import { events, request } from "./api.js";
import { h } from "./dom.js";
import { thumbnail } from "./images.js";
import { Settings } from "./settings.js";
import { showSnippets } from "./snippets.js";

export class Pane {
  constructor(onChange) {
    this.settings = new Settings();
    this.messages = [];
    this.onChange = onChange; // told when an answer begins or ends
    this.answering = null; // an AbortController while an answer comes
    this.log = h("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.code = h("button", { class: "plain", onclick: () => this.showCode() }, "Code");
    this.element = h(
      "section", { class: "card pane" },
      h("div", {}, h("div", { class: "pane-head" }, this.settings.model, this.code), this.settings.element),
      this.log
    );
  }

  clear() {
    this.answering?.abort();
    this.messages = [];
    this.log.replaceChildren();
  }

  // images: their URLs
  async send(text, images) {
    const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
    if (text) parts.push({ type: "text", text });
    this.messages.push({ role: "user", content: images.length ? parts : text });
    this.show(h(
      "div", { class: "turn user" },
      images.length > 0 && h("div", { class: "thumbnails" }, ...images.map(thumbnail)),
      text && h("div", { class: "text" }, text)
    ));
    await this.answer();
  }

  async answer() {
    const answer = new Answer();
    const { messages } = this; // a new conversation has others
    this.show(answer.element);
    this.answering = new AbortController();
    this.log.setAttribute("aria-busy", "true"); // read out once it is whole
    this.onChange();
    try {
      const body = { ...this.settings.body(messages), stream: true, stream_options: { include_usage: true } };
      const response = await request("v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
        signal: this.answering.signal,
      });
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        const atEnd = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 40;
        answer.add(chunk);
        if (atEnd) this.log.scrollTop = this.log.scrollHeight;
      }
    } catch (error) {
      if (error.name === "AbortError") answer.reason = "stopped";
      else answer.fail(error);
    }
    this.answering = null;
    this.log.removeAttribute("aria-busy");
    answer.end();
    if (answer.message.content !== null || answer.message.tool_calls) messages.push(answer.message);
    else if (messages.at(-1)?.role === "user") messages.pop(); // what had no answer can be sent again
    if (answer.message.tool_calls && answer.reason === "tool_calls") this.askForResults(answer.message.tool_calls);
    this.log.scrollTop = this.log.scrollHeight;
    this.onChange();
  }

  askForResults(calls) {
    const inputs = calls.map(() => h("textarea", { rows: "2", required: true }));
    const form = h(
      "form", { class: "call", onsubmit: (event) => { event.preventDefault(); this.sendResults(calls, inputs, form); } },
      ...calls.map((call, i) => h("label", {}, `What ${call.function.name} returns`, inputs[i])),
      h("div", { class: "actions" }, h("button", { class: "primary" }, "Send result"))
    );
    this.show(form);
  }

  async sendResults(calls, inputs, form) {
    form.remove();
    calls.forEach((call, i) => {
      this.messages.push({ role: "tool", tool_call_id: call.id, content: inputs[i].value });
      this.show(h("div", { class: "turn tool" }, h("div", { class: "text" }, inputs[i].value)));
    });
    await this.answer();
  }

  show(element) {
    this.log.append(element);
    this.log.scrollTop = this.log.scrollHeight;
  }

  // Show the newest request as code.
  showCode() {
    const asked = this.messages.findLastIndex((message) => message.role !== "assistant") + 1;
    const messages = asked ? this.messages.slice(0, asked) : [{ role: "user", content: "What is an ocean?" }];
    try {
      showSnippets({ ...this.settings.body(messages), stream: true });
    } catch (error) {
      this.show(h("p", { class: "problem", role: "alert" }, error.message));
    }
  }
}
