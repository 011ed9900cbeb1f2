// The same request for a shell and for OpenAI's Python client.

import { base, hasKey } from "./api.js";
import { h } from "./dom.js";

const OPENAI = new Set([
  "model", "messages", "temperature", "top_p", "max_tokens", "seed", "tools", "tool_choice", "response_format",
  "logprobs", "top_logprobs", "stream",
]);

export function curl(body) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", `'\\''`);
  const key = hasKey() ? ` \\\n  -H "authorization: Bearer $MANTA_API_KEY"` : "";
  return `curl -sN ${new URL("v1/chat/completions", base)}${key} \\\n  -H 'content-type: application/json' \\\n  -d '${quoted}'`;
}

export function python(body) {
  const key = hasKey() ? 'os.environ["MANTA_API_KEY"]' : '"none"';
  const fields = Object.entries(body).filter(([name]) => OPENAI.has(name) && name !== "stream");
  const lines = fields.map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  return [
    ...(hasKey() ? ["import os", ""] : []),
    "from openai import OpenAI", "",
    `client = OpenAI(base_url="${new URL("v1", base)}", api_key=${key})`,
    "stream = client.chat.completions.create(", ...lines, "    stream=True,", ")",
    "for chunk in stream:", '    print(chunk.choices[0].delta.content or "", end="", flush=True)',
  ].join("\n");
}

function literal(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const pad = " ".repeat(indent + 4);
  const parts = Array.isArray(value)
    ? value.map((inner) => literal(inner, indent + 4))
    : Object.entries(value).map(([key, inner]) => `${JSON.stringify(key)}: ${literal(inner, indent + 4)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const short = `${open}${parts.join(", ")}${close}`;
  return short.length + indent <= 90 && !short.includes("\n") ? short : `${open}\n${parts.map((part) => `${pad}${part},\n`).join("")}${" ".repeat(indent)}${close}`;
}

export function showSnippets(body) {
  const close = () => dialog.close();
  const block = (title, text) => {
    // only pages of localhost or with TLS have a clipboard
    const copy = navigator.clipboard && h("button", { class: "plain", onclick: async () => {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } }, "Copy");
    return h("section", {}, h("h3", {}, title), h("div", { class: "snippet" }, h("pre", { tabindex: "0" }, text), copy));
  };
  const dialog = h("dialog", { "aria-label": "The same request as code" }, h("div", {},
    h("h2", {}, "The same request as code"), block("curl", curl(body)), block("Python", python(body)),
    h("div", { class: "actions" }, h("button", { class: "primary", onclick: close, autofocus: true }, "Close"))));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
