// The same request for a shell and for OpenAI's Python client.

import { base, hasKey } from "./api.js";
import { h } from "./dom.js";

const OPENAI = new Set([
  "model", "messages", "temperature", "top_p", "max_tokens", "seed", "tools", "tool_choice", "response_format",
  "logprobs", "top_logprobs", "stream",
]);

// An image of a request. Code has it as a file: a shell takes no argument as long as a photo.
class ImageFile {
  constructor(url, number) {
    this.url = url;
    [this.head, this.type] = /^data:image\/(\w+);base64,/.exec(url);
    this.name = `image-${number}.${this.type}`;
  }

  toJSON() {
    return `${this.head}${this.name}`;
  }
}

// Return the body with files for its images, and these.
function withFiles(body) {
  const files = [];
  const withNames = JSON.parse(JSON.stringify(body), (key, value) => {
    if (key !== "url" || !String(value).startsWith("data:image/")) return value;
    const known = files.find((file) => file.url === value);
    if (!known) files.push(new ImageFile(value, files.length + 1));
    return known ?? files.at(-1);
  });
  return [withNames, files];
}

function curl(body, files) {
  let quoted = JSON.stringify(body, null, 2).replaceAll("'", `'\\''`);
  for (const { head, name } of files) {
    quoted = quoted.replaceAll(`"url": "${head}${name}"`, `"url": "${head}'"$(base64 < ${name} | tr -d '\\n')"'"`);
  }
  const key = hasKey() ? ` \\\n  -H "authorization: Bearer $MANTA_API_KEY"` : "";
  const [before, data] = files.length ? [`printf '%s' '${quoted}' | `, "@-"] : ["", `'${quoted}'`];
  return `${before}curl -sN ${new URL("v1/chat/completions", base)}${key} \\\n  -H 'content-type: application/json' \\\n  -d ${data}`;
}

function python(body, files) {
  const key = hasKey() ? 'os.environ["MANTA_API_KEY"]' : '"none"';
  const fields = Object.entries(body).filter(([name]) => OPENAI.has(name) && name !== "stream");
  const lines = fields.map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  return [
    ...(files.length ? ["import base64"] : []), ...(hasKey() ? ["import os"] : []), ...(files.length || hasKey() ? [""] : []),
    "from openai import OpenAI", "",
    `client = OpenAI(base_url="${new URL("v1", base)}", api_key=${key})`,
    "stream = client.chat.completions.create(", ...lines, "    stream=True,", ")",
    "for chunk in stream:", '    print(chunk.choices[0].delta.content or "", end="", flush=True)',
  ].join("\n");
}

function literal(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (value instanceof ImageFile) return `"${value.head}" + base64.b64encode(open("${value.name}", "rb").read()).decode()`;
  if (typeof value !== "object") return JSON.stringify(value);
  const pad = " ".repeat(indent + 4);
  const parts = Array.isArray(value)
    ? value.map((inner) => literal(inner, indent + 4))
    : Object.entries(value).map(([key, inner]) => `${JSON.stringify(key)}: ${literal(inner, indent + 4)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const short = `${open}${parts.join(", ")}${close}`;
  return short.length + indent <= 90 && !short.includes("\n") ? short : `${open}\n${parts.map((part) => `${pad}${part},\n`).join("")}${" ".repeat(indent)}${close}`;
}

export function showSnippets(whole) {
  const [body, files] = withFiles(whole);
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
    h("h2", {}, "The same request as code"), 
    files.length > 0 && h("p", { class: "files" }, "The code reads ", ...files.map(({ url, name }) =>
      h("a", { href: url, download: name }, name)), " in the folder where it runs: click to save."),
    block("curl", curl(body, files)), block("Python", python(body, files)),
    h("div", { class: "actions" }, h("button", { class: "primary", onclick: close, autofocus: true }, "Close"))));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
