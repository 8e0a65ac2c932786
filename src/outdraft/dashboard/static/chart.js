// A small chart over the last minutes: lines or stacked areas, with a cursor that reads one second.

import { html, svg } from "./dom.js";

const WIDTH = 300; // user units; the drawing is stretched to its box
const HEIGHT = 100;
const WINDOWS = [60, 120, 300]; // seconds: the smallest that holds what there is

/**
 * @typedef {object} Chart description
 * @property {string} title
 * @property {string} unit behind the number in the heading
 * @property {{name: string, label: string}[]} series from the bottom up
 * @property {boolean} stacked
 * @property {boolean} [sparse] few seconds have values: each is drawn as a point that can be seen
 * @property {number | null} top of the scale; null: what the values need
 * @property {(second: object) => (number | null)[]} values one per series; null: nothing to show
 * @property {(second: object) => number | null} headline the number in the heading
 * @property {(value: number | null) => string} format
 */
export class Chart {
  constructor(description) {
    Object.assign(this, description);
    this.windowS = WINDOWS[0];
    this.seconds = [];
    this.cursor = null; // seconds before the newest one, while somebody reads
    this.value = html("p", { class: "chart-value" });
    this.age = html("p", { class: "chart-age" });
    this.oldest = span("");
    this.scale = html("span", { class: "chart-scale" });
    this.readings = this.series.map(() => html("span", { class: "reading" }));
    this.drawing = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    });
    this.plot = html(
      "div",
      {
        class: ["plot", this.isDivided && "divided", this.sparse && "sparse"]
          .filter(Boolean)
          .join(" "),
        tabindex: 0,
        role: "slider",
        "aria-label": `${this.title}: second to read`,
        "aria-valuemax": 0,
      },
      this.scale,
      this.drawing,
    );
    this.element = html(
      "section",
      { class: "chart", "aria-label": this.title },
      html("header", {}, html("h3", {}, this.title), this.age, this.value),
      this.plot,
      html("p", { class: "chart-axis", "aria-hidden": "true" }, this.oldest, span("now")),
      this.legend(),
    );
    this.bind();
  }

  /** Whether the areas are parts of a whole, rather than one area under a line. */
  get isDivided() {
    return this.stacked && this.series.length > 1;
  }

  /** The number in the heading says it all where there is one series. */
  legend() {
    if (this.series.length === 1) return null;
    const items = this.series.map(({ name, label }, i) =>
      html("li", {}, html("span", { class: `key series-${name}` }), label, " ", this.readings[i]),
    );
    return html("ul", { class: "chart-legend" }, ...items);
  }

  bind() {
    this.plot.addEventListener("pointermove", (event) => {
      const { left, width } = this.plot.getBoundingClientRect();
      const share = (event.clientX - left) / width;
      this.read(Math.floor((1 - share) * this.windowS));
    });
    this.plot.addEventListener("pointerleave", () => this.read(null));
    this.plot.addEventListener("blur", () => this.read(null));
    this.plot.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: 1, ArrowDown: 1, ArrowRight: -1, ArrowUp: -1, PageDown: 10 };
      moves.PageUp = -10;
      if (!(event.key in moves)) return;
      event.preventDefault();
      this.read((this.cursor ?? 0) + moves[event.key]);
    });
  }

  read(cursor) {
    const oldest = Math.max(0, this.seconds.length - 1);
    this.cursor = cursor === null ? null : Math.min(oldest, Math.max(0, cursor));
    this.draw();
  }

  /** @param seconds the window, oldest first. */
  update(seconds) {
    this.seconds = seconds;
    this.windowS = WINDOWS.find((windowS) => windowS >= seconds.length) ?? WINDOWS.at(-1);
    this.oldest.textContent = `${this.windowS / 60} min ago`;
    this.plot.setAttribute("aria-valuemin", 1 - this.windowS);
    this.draw();
  }

  draw() {
    const rows = this.seconds.map((second) => this.values(second));
    const tops = this.stacked ? rows.map(stack) : rows;
    const top = this.top ?? niceTop(Math.max(0, ...tops.flat().map((value) => value ?? 0)));
    this.scale.textContent = this.format(top);
    const layers = this.series.map((_, i) => this.layer(tops, i, top));
    this.drawing.replaceChildren(...gridLines(), ...layers.flat().reverse(), ...this.cursorLine());
    this.showReadings(rows);
  }

  /** The area or line of one series. */
  layer(tops, i, top) {
    const { name } = this.series[i];
    const x = (row) => (WIDTH - ((tops.length - row) * WIDTH) / this.windowS).toFixed(2);
    const y = (value) => (HEIGHT - (value / top) * HEIGHT).toFixed(2);
    return runsOfValues(tops.map((row) => row[i])).flatMap((points) => {
      const steps = points.map(([row, value]) => `${x(row)},${y(value)}L${x(row + 1)},${y(value)}`);
      const line = steps.join("L");
      const area = `M${x(points[0][0])},${HEIGHT}L${line}V${HEIGHT}Z`;
      return [
        svg("path", { class: `line series-${name}`, d: `M${line}` }),
        this.stacked ? svg("path", { class: `area series-${name}`, d: area }) : null,
      ].filter(Boolean);
    });
  }

  cursorLine() {
    if (this.cursor === null) return [];
    const x = WIDTH - ((this.cursor + 0.5) * WIDTH) / this.windowS;
    return [svg("path", { class: "cursor", d: `M${x},0V${HEIGHT}` })];
  }

  showReadings(rows) {
    const at = rows.length - 1 - (this.cursor ?? 0);
    const second = this.seconds[at];
    const total = second ? this.headline(second) : null;
    const heading = this.format(total);
    this.value.replaceChildren(heading, html("span", { class: "unit" }, ` ${this.unit}`));
    this.age.textContent = this.cursor ? `${this.cursor} s ago` : "";
    for (const [i, reading] of this.readings.entries()) {
      reading.textContent = second ? this.format(rows[at][i]) : "–";
    }
    this.plot.setAttribute("aria-valuenow", -(this.cursor ?? 0));
    const when = this.cursor ? `${this.cursor} s ago` : "now";
    this.plot.setAttribute("aria-valuetext", `${when}: ${heading} ${this.unit}`);
  }
}

function span(text) {
  return html("span", {}, text);
}

function stack(values) {
  let sum = 0;
  if (values.every((value) => value === null)) return values;
  return values.map((value) => (sum += value ?? 0));
}

function gridLines() {
  return [0, 0.5, 1].map((share) =>
    svg("path", { class: "grid-line", d: `M0,${share * HEIGHT}H${WIDTH}` }),
  );
}

/** Runs of [index, value] without a gap. */
function runsOfValues(values) {
  const runs = [];
  let open = false;
  for (const [index, value] of values.entries()) {
    if (value !== null && !open) runs.push([]);
    if (value !== null) runs.at(-1).push([index, value]);
    open = value !== null;
  }
  return runs;
}

/** A round number at or just above the value. */
export function niceTop(value) {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((factor) => factor * unit >= value);
}
