// Small charts in SVG.

import { svg } from "./dom.js";

export function sparkline(values) {
  const top = Math.max(1, ...values);
  const points = values.map((value, i) => `${(100 * i) / Math.max(1, values.length - 1)},${30 - (28 * value) / top}`);
  const image = svg("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (values.length > 1) {
    image.append(
      svg("polygon", { class: "area", points: `0,30 ${points.join(" ")} 100,30` }),
      svg("polyline", { class: "curve", points: points.join(" ") })
    );
  }
  return image;
}
