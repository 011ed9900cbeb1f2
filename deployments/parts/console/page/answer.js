// One answer as it streams in: text, reasoning, tool calls, and how probable its tokens were.

import { h, setText } from "./dom.js";
import { count, duration, percent, rate } from "./format.js";

export class Answer {
  constructor() {
    this.message = { role: "assistant", content: "" };
    this.text = h("div", { class: "text" });
    this.thought = h("p", {});
    this.thinking = h("details", { class: "thought", hidden: true }, h("summary", {}, "Reasoning"), this.thought);
    this.calls = h("div", {});
    this.problem = h("p", { class: "problem", role: "alert" });
    this.about = h("p", { class: "about" });
    this.element = h("div", { class: "turn assistant streaming" }, this.thinking, this.text, this.calls, this.problem, this.about);
    this.started = performance.now();
    this.first = null; // milliseconds
  }

  add(chunk) {
    this.id = chunk.id || this.id;
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content, reasoning, tool_calls } = choice.delta ?? {};
    if (content || reasoning || reasoning_content || tool_calls) this.first ??= performance.now() - this.started;
    this.reason = choice.finish_reason ?? this.reason;
    if (reasoning ?? reasoning_content) {
      this.thinking.hidden = false;
      this.thought.append(reasoning ?? reasoning_content);
    }
    if (content) this.addText(content, choice.logprobs?.content ?? []);
    for (const call of tool_calls ?? []) this.addCall(call);
  }

  // tokens: with their probabilities, if those were asked for; some, as the one that ends a turn, are no text
  addText(content, tokens) {
    this.message.content += content;
    for (const token of tokens) {
      if (!token.token || !content.startsWith(token.token)) break;
      this.text.append(drawToken(token));
      content = content.slice(token.token.length);
    }
    this.text.append(content);
  }

  addCall({ index, id, function: given }) {
    const calls = (this.message.tool_calls ??= []);
    if (!calls[index]) {
      calls[index] = { id, type: "function", function: { name: "", arguments: "" } };
      this.calls.append(h("div", { class: "call" }, h("h3", {}), h("pre", {})));
    }
    const call = calls[index].function;
    call.name += given.name ?? "";
    call.arguments += given.arguments ?? "";
    const [name, body] = this.calls.children[index].children;
    setText(name, call.name);
    setText(body, call.arguments);
  }

  fail(error) {
    this.problem.textContent = error.message;
  }

  end() {
    this.element.classList.remove("streaming");
    const seconds = (performance.now() - this.started) / 1000;
    const tokens = this.usage?.completion_tokens ?? 0;
    const parts = [this.reason];
    if (tokens) parts.push(`${count(tokens)} tokens`);
    if (this.first !== null) parts.push(`first after ${duration(this.first / 1000)}`);
    if (tokens > 1) parts.push(`${rate((tokens - 1) / (seconds - this.first / 1000))} tokens/s`);
    this.about.append(...parts.filter(Boolean).map((part) => h("span", {}, part)));
    if (this.id) this.about.append(h("a", { href: `#requests/${encodeURIComponent(this.id)}` }, "what happened"));
    if (!this.message.content) this.message.content = null;
  }
}

const alternatives = h("ul", { class: "alternatives", hidden: true });
document.body.append(h("aside", { "aria-label": "Alternatives of a token" }, alternatives));
addEventListener("hashchange", () => { alternatives.hidden = true; });

function drawToken({ token, logprob, top_logprobs }) {
  const probability = Math.exp(logprob);
  const list = (top_logprobs ?? []).map((other) => [other.token, Math.exp(other.logprob)]);
  if (!list.some(([text]) => text === token)) list.push([token, probability]);
  const show = (event) => {
    alternatives.replaceChildren(...list.map(([text, p]) =>
      h("li", { class: text === token ? "chosen" : "" }, h("code", {}, JSON.stringify(text)), h("span", {}, percent(p)))));
    const { left, bottom } = event.target.getBoundingClientRect();
    alternatives.style.left = `${Math.min(left, innerWidth - 220)}px`;
    alternatives.style.top = `${Math.min(bottom + 6, innerHeight - 180)}px`;
    alternatives.hidden = false;
  };
  const hide = () => { alternatives.hidden = true; };
  return h("span", {
    class: "token", tabindex: "0", style: { "--p": probability }, onmouseenter: show, onfocus: show, onmouseleave: hide, onblur: hide,
  }, token);
}
