// Small drawings in SVG: lines over time with both axes, and bars of parts.

import { el, number, svg } from "../dom.js";

const WIDTH = 600;
const HEIGHT = 140;
const SPAN_S = 60;

// A round number of at least `value`: 1, 2 or 5 times a power of ten.
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((factor) => factor * power >= value * 0.999) * power;
}

// Lines of the last minute, the newest at the right. `lines` are [class, name]; `format` writes a value with its unit.
export class LineChart {
  constructor(label, lines, format, least) {
    this.label = label;
    this.lines = lines;
    this.format = format;
    this.least = least; // the smallest value of the top of the axis
    this.points = []; // [time in s, value or null of each line]
    this.area = svg("path", { class: "area" });
    this.paths = lines.map(([kind]) => svg("path", { class: `line ${kind}`, "vector-effect": "non-scaling-stroke" }));
    const grid = [0, 0.5].map((part) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part, "vector-effect": "non-scaling-stroke" }));
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, ...grid, this.area, ...this.paths);
    this.ticks = [1, 0.5, 0].map(() => el("span"));
    const legend = lines.length > 1 ? el("p", { class: "chart-legend" }, lines.map(([kind, name]) => el("span", {}, el("span", { class: `stroke ${kind}` }), ` ${name}`))) : null;
    this.element = el("div", { class: "chart" }, legend, el("div", { class: "chart-body" }, el("div", { class: "y-axis", "aria-hidden": "true" }, this.ticks), this.picture),
      el("div", { class: "x-axis", "aria-hidden": "true" }, ["60 s ago", "45 s", "30 s", "15 s", "now"].map((text) => el("span", {}, text))));
  }

  add(time, ...values) {
    this.points.push([time, ...values]);
    while (time - this.points[0][0] > SPAN_S) this.points.shift();
    const most = ceiling(Math.max(this.least, ...this.points.flatMap(([, ...all]) => all.map((value) => value ?? 0))));
    const x = (at) => (WIDTH * (1 - (time - at) / SPAN_S)).toFixed(1);
    const y = (value) => (HEIGHT * (1 - value / most)).toFixed(1);
    this.paths.forEach((path, line) => {
      const known = this.points.filter((point) => point[line + 1] !== null);
      const d = known.map((point) => `${x(point[0])} ${y(point[line + 1])}`).join("L");
      path.setAttribute("d", d && `M${d}`);
      if (line === 0 && this.lines.length === 1) this.area.setAttribute("d", d && `M${x(known[0][0])} ${HEIGHT}L${d}L${x(known.at(-1)[0])} ${HEIGHT}Z`);
    });
    [1, 0.5, 0].forEach((part, index) => (this.ticks[index].textContent = part ? this.format(most * part) : "0"));
    const now = values.map((value, index) => `${this.lines[index][1]} ${value === null ? "none" : this.format(value)}`).join(", ");
    this.picture.setAttribute("aria-label", `${this.label} of the last minute. Now: ${now}`);
  }
}

// A horizontal bar of parts: [class, amount, name]. A part that is not empty is seen.
export function parts(all, total, label) {
  const bar = el("div", { class: "parts", role: "img", "aria-label": `${label}: ${all.map(([, amount, name]) => `${name} ${number(amount)}`).join(", ")}` });
  for (const [kind, amount] of all) {
    const part = el("span", { class: kind });
    part.style.width = `${total ? (100 * amount) / total : 0}%`;
    if (amount) part.style.minWidth = "3px";
    bar.append(part);
  }
  return bar;
}
