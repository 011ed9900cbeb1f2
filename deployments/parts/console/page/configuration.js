// The configuration as it runs, with every default.

import { getJson } from "./api.js";
import { h } from "./dom.js";

export class ConfigurationView {
  constructor() {
    this.body = h("div", { class: "card keys" });
    this.version = h("p", { class: "lead" });
    this.element = h("div", { class: "view" }, h("h1", {}, "Configuration"), this.version, this.body);
  }

  async open() {
    try {
      const { configuration, version } = await getJson("console/facts");
      this.version.textContent = `Manta ${version}. Every key of serve_config.yaml as it is in force; API keys and passwords are left out.`;
      const hidden = h("p", {}, "Only keys of ingress.admin_keys see the configuration.");
      this.body.replaceChildren(...(Object.keys(configuration).length ? entries(configuration) : [hidden]));
    } catch (error) {
      this.body.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message));
    }
  }
}

function entries(value) {
  return Object.entries(value).map(([key, inner]) => {
    if (inner !== null && typeof inner === "object" && Object.keys(inner).length) {
      const name = Array.isArray(value) ? (inner.name ?? key) : key;
      return h("details", { open: true }, h("summary", {}, name), ...entries(inner));
    }
    return h("div", { class: "key" }, h("span", {}, key), h("code", {}, typeof inner === "string" ? inner : JSON.stringify(inner)));
  });
}
