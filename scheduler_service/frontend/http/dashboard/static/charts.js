// Lines over the last minutes, with their newest values as text and all of them as a table.

import { $, element, setText } from "./dom.js";
import { count, duration, short } from "./format.js";
import { colourOf } from "./theme.js";
import { hideTip, showTip } from "./tip.js";

const SHOWN_S = [60, 120, 300]; // the shortest that holds all points, or the last
const BOTTOM = 17;
const COLOURS = ["--one", "--two", "--three"];
const TABLE_ROWS = 20;
const FONT = `11px ${getComputedStyle(document.body).fontFamily}`;

const perSecond = (n) => (n == null ? "–" : `${short(n)} /s`);
const CHARTS = [
  {
    title: "Throughput",
    series: [["output", "output"], ["prompt", "prompt"]],
    show: perSecond,
    value: (p) => [short(p.output), "output tokens/s"],
  },
  {
    title: "Time to first token",
    series: [["firstTokenP50", "p50"], ["firstTokenP90", "p90"], ["firstTokenP99", "p99"]],
    show: duration,
    value: (p) => [duration(p.firstTokenP50), "median"],
  },
  {
    title: "Between tokens",
    series: [["interTokenP50", "p50"], ["interTokenP90", "p90"], ["interTokenP99", "p99"]],
    show: duration,
    value: (p) => [duration(p.interTokenP50), "median"],
  },
  {
    title: "Requests",
    series: [["running", "running"], ["waiting", "waiting"], ["swapped", "swapped"]],
    show: (n) => (n == null ? "–" : count(n)),
    value: (p) => [count(p.running ?? 0), "running"],
  },
];

export class Charts {
  constructor(view) {
    this.view = view;
    this.charts = CHARTS.map((spec) => new Chart(spec, view));
    $("charts").append(...this.charts.map((chart) => chart.root));
    $("charts-table").closest("details").addEventListener("toggle", () => this.#fillTable());
  }

  draw() {
    for (const chart of this.charts) chart.draw();
    this.#fillTable();
  }

  #fillTable() {
    const table = $("charts-table");
    if (!table.closest("details").open) return;
    const columns = CHARTS.flatMap((spec) =>
      spec.series.map(([field, name]) => [field, `${spec.title}, ${name}`, spec.show]),
    );
    const cell = (text) => element("td", { class: "number" }, text);
    const head = ["Time", ...columns.map(([, name]) => name)];
    const rows = this.view.points.slice(-TABLE_ROWS).reverse().map((point) => {
      const at = new Date(point[0] * 1000).toLocaleTimeString();
      const values = columns.map(([field, , show]) => cell(show(point[this.view.fields.indexOf(field)])));
      return element("tr", {}, element("th", { scope: "row" }, at), ...values);
    });
    table.replaceChildren(
      element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, ...rows),
    );
  }
}

class Chart {
  constructor(spec, view) {
    this.spec = spec;
    this.view = view;
    this.value = element("p", { class: "value" });
    this.canvas = element("canvas", { role: "img" });
    this.legend = element("ul", { class: "legend" });
    this.values = spec.series.map(([, name], i) => {
      const value = element("b");
      this.legend.append(element("li", {}, element("i", { class: `i${i}` }), name, value));
      return value;
    });
    const heading = element("h3", {}, spec.title);
    this.root = element("div", { class: "panel chart" }, heading, this.value, this.legend, this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.#hover(event));
    this.canvas.addEventListener("pointerleave", () => this.#leave());
    this.size = [0, 0];
    new ResizeObserver(([entry]) => {
      this.size = [entry.contentRect.width, entry.contentRect.height];
      this.draw();
    }).observe(this.canvas);
  }

  draw() {
    const points = this.#shown();
    const last = points.at(-1);
    const named = Object.fromEntries(this.view.fields.map((field, i) => [field, last?.[i]]));
    const [number, unit] = this.spec.value(named);
    if (this.value.dataset.text !== number + unit) {
      this.value.dataset.text = number + unit;
      this.value.replaceChildren(number, element("small", {}, unit));
    }
    const texts = this.spec.series.map(([field], i) => {
      setText(this.values[i], this.spec.show(named[field]));
      return `${this.spec.series[i][1]} ${this.spec.show(named[field])}`;
    });
    this.canvas.setAttribute("aria-label", `${this.spec.title}: ${texts.join(", ")}`);
    this.#paint(points);
  }

  #shown() {
    const newest = this.view.points.at(-1)?.[0] ?? 0;
    const age = newest - (this.view.points[0]?.[0] ?? 0);
    this.shownS = SHOWN_S.find((seconds) => seconds >= age) ?? SHOWN_S.at(-1);
    return this.view.points.filter((point) => point[0] >= newest - this.shownS);
  }

  #paint(points) {
    const { canvas } = this;
    const [width, height] = this.size;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const fields = this.spec.series.map(([field]) => this.view.fields.indexOf(field));
    const top = niceCeiling(Math.max(0, ...points.flatMap((p) => fields.map((f) => p[f] ?? 0))));
    const newest = points.at(-1)?.[0] ?? 0;
    this.x = (time) => width - ((newest - time) / this.shownS) * width;
    const y = (value) => height - BOTTOM - (value / top) * (height - BOTTOM - 14);
    this.#grid(context, width, y, top);
    fields.forEach((field, i) => this.#line(context, points, field, y, colourOf(COLOURS[i])));
    if (this.hovered != null) {
      context.fillStyle = colourOf("--quiet");
      context.fillRect(Math.round(this.x(this.hovered)) - 0.5, 10, 1, height - BOTTOM - 10);
    }
  }

  #grid(context, width, y, top) {
    context.font = FONT;
    for (const share of [0, 0.5, 1]) {
      context.fillStyle = colourOf("--line");
      context.fillRect(0, Math.round(y(share * top)), width, 1);
    }
    context.fillStyle = colourOf("--quiet");
    context.textBaseline = "bottom";
    context.fillText(this.spec.show(top), 0, y(top) - 1);
    context.textBaseline = "alphabetic";
    context.fillText(`${this.shownS / 60} min ago`, 0, y(0) + 13);
    context.textAlign = "right";
    context.fillText("now", width, y(0) + 13);
    context.textAlign = "left";
  }

  #line(context, points, field, y, colour) {
    context.strokeStyle = colour;
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    context.beginPath();
    let before = null;
    for (const point of points) {
      const value = point[field];
      if (value == null) {
        before = null;
        continue;
      }
      const isGap = before == null || point[0] - before > 5;
      context[isGap ? "moveTo" : "lineTo"](this.x(point[0]), y(value));
      before = point[0];
    }
    context.stroke();
  }

  #hover(event) {
    const points = this.#shown();
    if (!points.length || !this.x) return;
    const nearest = points.reduce((best, point) =>
      Math.abs(this.x(point[0]) - event.offsetX) < Math.abs(this.x(best[0]) - event.offsetX) ? point : best,
    );
    this.hovered = nearest[0];
    this.#paint(points);
    const ago = Math.round(points.at(-1)[0] - nearest[0]);
    const texts = this.spec.series.map(
      ([field, name]) => `${name} ${this.spec.show(nearest[this.view.fields.indexOf(field)])}`,
    );
    showTip(event.clientX, event.clientY, `${ago ? `${duration(ago * 1000)} ago` : "now"}: ${texts.join(", ")}`);
  }

  #leave() {
    this.hovered = null;
    hideTip();
    this.draw();
  }
}

// The least of 1, 2, 3, 5, 8 and 10 times a power of ten that is not below.
function niceCeiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 5, 8, 10].find((step) => step * power >= value) * power;
}
