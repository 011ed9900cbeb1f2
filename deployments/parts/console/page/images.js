// The images of a message that is being written.

import { h } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"]; // what the server reads
const MAX_SIDE = 2048; // pixels; what is larger is made smaller here, so that photos do not fill a request

export class Images {
  constructor(onProblem) {
    this.urls = []; // data: URLs, in their order
    this.onProblem = onProblem;
    this.file = h("input", { type: "file", accept: TYPES.join(), multiple: true, hidden: true, onchange: () => {
      this.add([...this.file.files]);
      this.file.value = ""; // the same file may be chosen again
    } });
    this.button = h("button", { class: "plain", title: "Or paste or drop them", onclick: () => this.file.click() }, "Add images");
    this.element = h("div", { class: "thumbnails" });
  }

  async add(files) {
    this.onProblem("");
    for (const file of files) {
      try {
        this.urls.push(await dataUrl(file));
      } catch {
        this.onProblem(`${file.name} is no image that this browser can read`);
      }
    }
    this.draw();
  }

  // Give the images away.
  take() {
    const { urls } = this;
    this.urls = [];
    this.draw();
    return urls;
  }

  draw() {
    this.element.replaceChildren(...this.urls.map((url, i) => h("figure", {}, thumbnail(url, i),
      h("button", { "aria-label": `Remove image ${i + 1}`, onclick: () => {
        this.urls.splice(i, 1);
        this.draw();
        (this.element.querySelectorAll("button")[i] ?? this.button).focus();
      } }, "×"))));
  }
}

export const thumbnail = (url, i) => h("img", { src: url, alt: `Image ${i + 1}` });
export const imagesOf = (transfer) => [...transfer.files].filter((file) => file.type.startsWith("image/"));

async function dataUrl(file) {
  const bitmap = await createImageBitmap(file); // throws for what is no image
  const scale = MAX_SIDE / Math.max(bitmap.width, bitmap.height);
  if (scale >= 1 && TYPES.includes(file.type)) {
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });
  }
  const size = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * Math.min(1, scale))));
  const canvas = h("canvas", { width: size[0], height: size[1] });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, ...size);
  return canvas.toDataURL(file.type === "image/jpeg" ? "image/jpeg" : "image/png", 0.9);
}
