// The live view: the event feed as charts.

import { Chart } from "./chart.js";
import { byId } from "./dom.js";
import { number, percent } from "./format.js";
import { originLabel } from "./origins.js";

const WINDOW_S = 300;
const RETRY_MS = 2000;
const PHASES = ["verify", "draft", "sample", "host"];

/** Charts of what the sources of an engine bring. */
function sourceCharts(sources) {
  const series = sources.map((name) => ({ name, label: originLabel(name) }));
  return [
    {
      title: "Throughput",
      unit: "tokens/s",
      series: [{ name: "own", label: "Model itself" }, ...series],
      stacked: true,
      top: null,
      values: (second) => tokensBySource(second, sources),
      headline: (second) => second.tokens_per_s,
      format: number,
    },
    {
      title: "Acceptance length",
      unit: "tokens a draft",
      series: [{ name: "all", label: "All drafts" }, ...series],
      stacked: false,
      top: null,
      values: (second) => [
        second.acceptance_length,
        ...sources.map((name) => second.acceptance_length_by_source[name] ?? null),
      ],
      headline: (second) => second.acceptance_length,
      format: number,
    },
    ...(sources.length ? [SPEEDUP, ...DECISIONS] : []),
  ];
}

const SPEEDUP = {
  title: "Computing speed",
  unit: "times as fast",
  series: [
    { name: "measured", label: "Tokens/s of step time" },
    { name: "estimate", label: "Without speculation, estimated" },
  ],
  stacked: false,
  top: null,
  values: (second) => [
    second.step_tokens_per_s,
    second.step_tokens_per_s === null ? null : second.plain_tokens_per_s,
  ],
  headline: speedup,
  format: number,
};

const POSITIONS = [0, 1, 2, 3];
// Reasons in words, and what counts as one of them.
const REASONS = [
  { name: "drafting", label: "Drafting", reasons: ["gain"] },
  { name: "probing", label: "Trying out", reasons: ["network_probe", "plain_probe"] },
  { name: "no-gain", label: "Off: no gain", reasons: ["no_gain"] },
  { name: "patience", label: "Off: lost time lately", reasons: ["patience"] },
  {
    name: "idle",
    label: "Off: no draft possible",
    reasons: ["nothing_offered", "no_room", "disabled", "not_wanted"],
  },
];

/** What was decided, and how right it was. */
const DECISIONS = [
  {
    title: "Steps by decision",
    unit: "of steps draft",
    series: REASONS,
    stacked: true,
    top: 1,
    values: reasonShares,
    headline: (second) => reasonShares(second)[0],
    format: percent,
  },
  {
    title: "Step time",
    unit: "ms",
    series: [
      { name: "measured", label: "Measured" },
      { name: "estimate", label: "Predicted" },
    ],
    stacked: false,
    top: null,
    values: (second) => [inMs(second.measured_step_s), inMs(second.predicted_step_s)],
    headline: (second) => inMs(second.measured_step_s),
    format: number,
  },
  {
    title: "Price of a row",
    unit: "accepted tokens",
    series: [{ name: "draft-length", label: "Mean" }],
    stacked: false,
    top: null,
    values: (second) => [second.price],
    headline: (second) => second.price,
    format: number,
  },
  {
    title: "Acceptance curve",
    unit: "at position 1",
    series: POSITIONS.map((at) => ({ name: `position-${at + 1}`, label: `Position ${at + 1}` })),
    stacked: false,
    top: 1,
    values: (second) => POSITIONS.map((at) => second.acceptance_by_position[at] ?? null),
    headline: (second) => second.acceptance_by_position[0] ?? null,
    format: percent,
  },
];

function reasonShares({ reasons }) {
  const counts = REASONS.map((one) => one.reasons.reduce((n, name) => n + (reasons[name] ?? 0), 0));
  const total = counts.reduce((sum, each) => sum + each, 0);
  return counts.map((each) => (total > 0 ? each / total : null));
}

function inMs(seconds) {
  return seconds === null ? null : seconds * 1000;
}

/** Median and 95th percentile of one kind of latency, in milliseconds. */
function latencyChart(title, name) {
  return {
    title,
    unit: "ms, median",
    series: [
      { name: "median", label: "Median" },
      { name: "slow", label: "95 % are faster than" },
    ],
    stacked: false,
    top: null,
    values: (second) => [inMs(second[`${name}_p50_s`]), inMs(second[`${name}_p95_s`])],
    headline: (second) => inMs(second[`${name}_p50_s`]),
    format: number,
  };
}

const CHARTS = [
  { ...latencyChart("Time to first token (TTFT)", "ttft"), sparse: true },
  latencyChart("Between tokens (ITL)", "itl"),
  {
    title: "Draft length",
    unit: "tokens a draft",
    series: [
      { name: "draft-length", label: "Drafted" },
      { name: "estimate", label: "Granted" },
    ],
    stacked: false,
    top: null,
    values: (second) => [second.mean_draft_length, second.mean_granted_length],
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

/** The target's own tokens, then what each source brought. */
function tokensBySource(second, sources) {
  const accepted = sources.map((name) => second.accepted[name] ?? 0);
  const sum = accepted.reduce((left, right) => left + right, 0);
  return [Math.max(0, second.tokens_per_s - sum), ...accepted]; // texts may end inside a draft
}

function timeShares(second) {
  const seconds = PHASES.map((name) => second[`${name}_s`]);
  const total = seconds.reduce((sum, each) => sum + each, 0);
  return seconds.map((each) => (total > 0 ? each / total : null));
}

/** How many times faster the steps were than the estimate; nothing where there was no step. */
function speedup({ step_tokens_per_s: measured, plain_tokens_per_s: estimate }) {
  return measured === null || !estimate ? null : measured / estimate;
}

export class Live {
  /** @param onFacts is called with what the engine is. */
  constructor(api, onFacts) {
    this.api = api;
    this.onFacts = onFacts;
    this.seconds = [];
    this.sources = null;
    this.showCharts([]);
  }

  /** The charts of an engine with these sources, made anew only if they are others. */
  showCharts(sources) {
    if (this.sources?.join() === sources.join()) return;
    this.sources = sources;
    const descriptions = [...sourceCharts(sources), ...CHARTS];
    this.charts = descriptions.map((description) => new Chart(description));
    byId("charts").replaceChildren(...this.charts.map((chart) => chart.element));
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
      this.showCharts(data.speculation_methods);
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
