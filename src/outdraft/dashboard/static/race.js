// A comparison as a race: both runs again, side by side, each at the pace that was measured.

import { html } from "./dom.js";
import { duration, number } from "./format.js";

const SHORTEST_S = 5; // a faster race is slowed down, for people to see it
const LONGEST_S = 15;

/**
 * How many times slower than it was a race is shown: the same for both runs.
 *
 * @param totalS seconds of the slower run.
 */
export function slowdown(totalS) {
  return Math.min(LONGEST_S, Math.max(SHORTEST_S, totalS)) / totalS;
}

export class Race {
  /** @param panes whose runs have ended. @param outcome what the comparison came to. */
  constructor(panes, outcome) {
    this.panes = panes;
    this.endS = Math.max(...panes.map(({ run }) => run.total));
    this.atS = this.endS;
    this.frame = null; // while it plays
    this.lanes = panes.map(({ title }) => lane(title));
    const fastest = Math.min(...panes.map(({ run }) => run.total));
    for (const [i, { run }] of panes.entries()) {
      this.lanes[i].element.dataset.first = String(run.total === fastest);
    }
    this.button = html("button", { type: "button", class: "secondary" }, "Replay");
    this.slider = html("input", {
      type: "range",
      class: "scrubber",
      min: 0,
      max: 1000,
      step: 1,
      "aria-label": "Time in the race",
    });
    this.element = html(
      "section",
      { class: "race", "aria-label": "Race" },
      verdict(outcome),
      html("div", { class: "lanes" }, ...this.lanes.map(({ element }) => element)),
      html("div", { class: "race-controls" }, this.button, this.slider),
      html("p", { class: "hint" }, pace(slowdown(this.endS))),
    );
    this.button.addEventListener("click", () => (this.frame === null ? this.play() : this.stop()));
    this.slider.addEventListener("input", () => {
      const chosenS = (this.slider.valueAsNumber / 1000) * this.endS;
      this.stop();
      this.show(chosenS);
    });
    this.show(this.endS);
  }

  /** From the beginning, or from where it was stopped. */
  play() {
    const fromS = this.atS < this.endS ? this.atS : 0;
    const startMs = performance.now();
    const tick = (nowMs) => {
      const passedS = Math.max(0, nowMs - startMs) / 1000 / slowdown(this.endS);
      const isOver = !this.element.isConnected || fromS + passedS >= this.endS;
      this.frame = isOver ? null : requestAnimationFrame(tick);
      this.show(isOver ? this.endS : fromS + passedS);
    };
    this.frame = requestAnimationFrame(tick);
    this.show(fromS);
  }

  stop() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = null;
    this.show(this.atS);
  }

  /** How far both were, so many seconds after their start. */
  show(atS) {
    this.atS = atS;
    for (const [i, pane] of this.panes.entries()) {
      const { run } = pane;
      const isThere = atS >= run.total;
      const numTokens = isThere ? run.tokens.length : run.tokensAt(atS);
      pane.showFirst(numTokens);
      const { element, fill, time } = this.lanes[i];
      fill.style.width = `${(100 * numTokens) / Math.max(1, run.tokens.length)}%`;
      time.textContent = duration(Math.min(atS, run.total));
      element.dataset.finished = String(isThere);
    }
    this.slider.value = Math.round((1000 * atS) / this.endS);
    const where = `${duration(atS)} of ${duration(this.endS)}`;
    this.slider.setAttribute("aria-valuetext", where);
    const isPlaying = this.frame !== null;
    this.button.textContent = isPlaying ? "Pause" : atS < this.endS ? "Play on" : "Replay";
  }
}

function verdict({ same, headline, text }) {
  return html("p", { class: "verdict", "data-same": same }, html("strong", {}, headline), ` ${text}`);
}

function lane(title) {
  const fill = html("span", { class: "lane-fill" });
  const time = html("span", { class: "lane-time" });
  const track = html("span", { class: "lane-track", "aria-hidden": "true" }, fill);
  const name = html("span", { class: "lane-name" }, title);
  const element = html("p", { class: "lane" }, name, track, time);
  return { element, fill, time };
}

function pace(factor) {
  const before = "Each text comes as it came when it was measured alone";
  if (factor > 1.05) return `${before}, both ${number(factor)} times slower.`;
  if (factor < 0.95) return `${before}, both ${number(1 / factor)} times faster.`;
  return `${before}.`;
}
