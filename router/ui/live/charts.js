// Small drawings in SVG: lines over time, and bars of parts.

import { el, number, svg } from "../dom.js";

const WIDTH = 600;
const HEIGHT = 120;

// A line of the last values, the newest at the right. `label` is read out with the newest value.
export class Line {
  constructor(label, size = 120) {
    this.label = label;
    this.size = size;
    this.values = [];
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line", "vector-effect": "non-scaling-stroke" });
    this.top = el("span", { class: "chart-top dim" });
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, this.area, this.line);
    this.element = el("div", { class: "chart" }, this.top, this.picture);
  }

  add(value) {
    this.values.push(value);
    if (this.values.length > this.size) this.values.shift();
    const most = Math.max(1, ...this.values) * 1.1;
    const step = WIDTH / (this.size - 1);
    const offset = this.size - this.values.length;
    const points = this.values.map((each, index) => `${((index + offset) * step).toFixed(1)} ${(HEIGHT - (each / most) * HEIGHT).toFixed(1)}`);
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${(offset * step).toFixed(1)} ${HEIGHT}L${points.join("L")}L${WIDTH} ${HEIGHT}Z`);
    this.top.textContent = number(most);
    this.picture.setAttribute("aria-label", `${this.label}: now ${number(value)}`);
  }
}

// A horizontal bar of parts: [class, amount, name].
export function parts(all, total, label) {
  const bar = el("div", { class: "parts", role: "img", "aria-label": `${label}: ${all.map(([, amount, name]) => `${name} ${number(amount)}`).join(", ")}` });
  for (const [kind, amount] of all) {
    const part = el("span", { class: kind });
    part.style.width = `${total ? (100 * amount) / total : 0}%`;
    bar.append(part);
  }
  return bar;
}
