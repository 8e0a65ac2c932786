// The live view: the event feed as charts.

import { Chart } from "./chart.js";
import { byId } from "./dom.js";
import { number, percent } from "./format.js";
import { ORIGINS, originLabel } from "./origins.js";

const WINDOW_S = 300;
const RETRY_MS = 2000;
const TARGET_ORIGINS = ["plain", "bonus", "recovered"];
const SOURCES = ORIGINS.map(({ name }) => name).filter((name) => !TARGET_ORIGINS.includes(name));
const PHASES = ["verify", "draft", "sample", "host"];

const CHARTS = [
  {
    title: "Throughput",
    unit: "tokens/s",
    series: [{ name: "throughput", label: "Generated" }],
    stacked: true,
    top: null,
    values: (second) => [second.tokens_per_s],
    headline: (second) => second.tokens_per_s,
    format: number,
  },
  {
    title: "Acceptance length",
    unit: "tokens a draft",
    series: [
      { name: "own", label: "Model itself" },
      ...SOURCES.map((name) => ({ name, label: originLabel(name) })),
    ],
    stacked: true,
    top: null,
    values: acceptedBySource,
    headline: (second) => second.acceptance_length,
    format: number,
  },
  {
    title: "Draft length",
    unit: "tokens a draft",
    series: [{ name: "draft-length", label: "Mean" }],
    stacked: false,
    top: null,
    values: (second) => [second.mean_draft_length],
    headline: (second) => second.mean_draft_length,
    format: number,
  },
  {
    title: "Where the time goes",
    unit: "verifying",
    series: PHASES.map((name) => ({ name, label: name[0].toUpperCase() + name.slice(1) })),
    stacked: true,
    top: 1,
    values: timeShares,
    headline: (second) => timeShares(second)[0],
    format: percent,
  },
  {
    title: "KV cache",
    unit: "in use",
    series: [{ name: "kv", label: "Blocks" }],
    stacked: true,
    top: 1,
    values: (second) => [second.kv_usage],
    headline: (second) => second.kv_usage,
    format: percent,
  },
  {
    title: "Requests",
    unit: "running",
    series: [
      { name: "running", label: "Running" },
      { name: "waiting", label: "Waiting" },
    ],
    stacked: false,
    top: null,
    values: (second) => [second.running, second.waiting],
    headline: (second) => second.running,
    format: number,
  },
];

/** Tokens a draft: the target's own one, then what each source brought. */
function acceptedBySource(second) {
  if (!second.drafts) return [null, ...SOURCES.map(() => null)];
  return [1, ...SOURCES.map((name) => (second.accepted[name] ?? 0) / second.drafts)];
}

function timeShares(second) {
  const seconds = PHASES.map((name) => second[`${name}_s`]);
  const total = seconds.reduce((sum, each) => sum + each, 0);
  return seconds.map((each) => (total > 0 ? each / total : null));
}

export class Live {
  /** @param onFacts is called with what the engine is. */
  constructor(api, onFacts) {
    this.api = api;
    this.onFacts = onFacts;
    this.seconds = [];
    this.charts = CHARTS.map((description) => new Chart(description));
    byId("charts").append(...this.charts.map((chart) => chart.element));
    this.draw();
  }

  /** Follow the feed for good; a broken connection is made again. */
  async follow() {
    while (true) {
      try {
        for await (const event of this.api.events()) this.take(event);
        this.show("closed", "disconnected");
      } catch (error) {
        const locked = error.status === 401;
        this.show(locked ? "locked" : "closed", locked ? "API key needed" : "disconnected");
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  take({ event, data }) {
    if (event === "facts") {
      this.seconds = [];
      this.onFacts(data);
    }
    if (event === "seconds") {
      this.seconds = [...this.seconds, ...data].slice(-WINDOW_S);
      this.show("open", `${number(this.seconds.at(-1)?.tokens_per_s ?? 0)} tokens/s`);
      this.draw();
    }
  }

  /** Nothing is drawn while nobody looks. */
  draw() {
    if (byId("view-live").hidden) return;
    for (const chart of this.charts) chart.update(this.seconds);
  }

  show(state, text) {
    byId("link").dataset.state = state;
    byId("link-text").textContent = text;
  }
}
