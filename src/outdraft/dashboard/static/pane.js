// One run on the page: its text, its figures, its steps.

import { describeStep, stepDetail } from "./detail.js";
import { html, rovingFocus } from "./dom.js";
import { duration, milliseconds, number } from "./format.js";
import { isKnownOrigin, ORIGINS, originLabel, sourcesInWords } from "./origins.js";

const FIGURES = [
  ["First token", "ttft", (run) => duration(run.ttft)],
  ["Tokens/s", "rate", (run) => number(run.rate)],
  ["Total", "total", (run) => duration(run.total)],
  ["Tokens", "tokens", (run) => number(run.numTokens)],
  ["Tokens a step", "per-step", (run) => number(run.tokensPerStep)],
  ["Accepted", "accepted", (run) => (run.drafted ? `${run.accepted} of ${run.drafted}` : "–")],
];

const ENDS = { stop: "finished", length: "stopped at max tokens" };

export class Pane {
  /** @param run the Run to show. @param detail the page's Detail. */
  constructor(run, title, detail) {
    this.run = run;
    this.state = html("span", { class: "pane-state" }, "waiting");
    this.output = html("div", {
      class: "output",
      role: "group",
      "aria-label": `${title}: text. Arrow keys go through the tokens.`,
    });
    this.mix = html("div", { class: "mix", role: "img", "aria-label": "No tokens yet" });
    this.figures = html("dl", { class: "figures" });
    this.count = html("span", { class: "count" }, "0");
    this.steps = html("ol", { class: "steps", "aria-label": `${title}: steps` });
    this.problem = html("p", { class: "problem", role: "alert", hidden: true });
    this.element = html(
      "section",
      { class: "pane", "aria-label": title },
      html("header", { class: "pane-head" }, html("h3", {}, title), this.state),
      this.output,
      this.problem,
      this.mix,
      this.figures,
      html("h4", { class: "steps-head" }, "Steps ", this.count),
      this.steps,
    );
    this.shownTokens = 0;
    this.shownSteps = 0;
    this.bind(detail);
    this.update();
  }

  bind(detail) {
    rovingFocus(this.output, ".token:not(:empty)");
    rovingFocus(this.steps, ".step");
    detail.bind(this.output, ".token", (token) => this.tokenDetail(Number(token.dataset.index)));
    detail.bind(this.steps, ".step", (step) => this.stepDetail(Number(step.dataset.index)));
    for (const [enter, leave] of [
      ["pointerover", "pointerout"],
      ["focusin", "focusout"],
    ]) {
      this.steps.addEventListener(enter, (event) => {
        const step = event.target.closest(".step");
        if (step) this.mark(Number(step.dataset.index));
      });
      this.steps.addEventListener(leave, () => this.unmark());
    }
  }

  /** @param state "running", "stopped", "failed", or the reason why the text ended. */
  setState(state) {
    this.state.textContent = ENDS[state] ?? state;
    this.element.dataset.state = state;
  }

  fail(message) {
    this.problem.textContent = message;
    this.problem.hidden = false;
  }

  /** Show what has come since the last call. */
  update() {
    const { tokens, steps } = this.run;
    for (; this.shownTokens < tokens.length; this.shownTokens++) {
      this.output.append(this.token(tokens[this.shownTokens], this.shownTokens));
    }
    for (; this.shownSteps < steps.length; this.shownSteps++) {
      this.steps.append(this.step(steps[this.shownSteps], this.shownSteps));
    }
    this.count.textContent = String(steps.length);
    this.updateMix();
    const figures = FIGURES.map(([label, name, value]) =>
      html("div", { "data-figure": name }, html("dt", {}, label), html("dd", {}, value(this.run))),
    );
    this.figures.replaceChildren(...figures);
  }

  updateMix() {
    const total = this.run.tokens.length;
    const counts = new Map();
    for (const { origin } of this.run.tokens) counts.set(origin, (counts.get(origin) ?? 0) + 1);
    const present = ORIGINS.filter(({ name }) => counts.has(name));
    const segments = present.map(({ name }) => {
      const segment = html("span", { class: `share origin-${name}` });
      segment.style.flexGrow = String(counts.get(name));
      return segment;
    });
    this.mix.replaceChildren(...segments);
    const words = present.map(({ name, label }) => `${label} ${counts.get(name)}`);
    this.mix.setAttribute("aria-label", total ? `Tokens: ${words.join(", ")}` : "No tokens yet");
  }

  token({ text, origin }, index) {
    const known = origin !== null && isKnownOrigin(origin);
    return html(
      "span",
      {
        class: known ? `token origin-${origin}` : "token",
        "data-origin": origin,
        "data-index": index,
        tabindex: index === 0 ? 0 : -1,
      },
      text,
    );
  }

  step(step, index) {
    const { drafted, accepted, sources, seconds } = step;
    const words = sourcesInWords(sources) || "plain";
    const counts = drafted.length ? `${accepted.size}/${drafted.length}` : "";
    return html(
      "li",
      {
        class: `step origin-${sources[0] ?? "plain"}`,
        "data-index": index,
        tabindex: index === 0 ? 0 : -1,
        "aria-label": `Step ${index + 1}, ${describeStep(step)}`,
      },
      html("span", { class: "step-source" }, words[0].toUpperCase() + words.slice(1)),
      html("span", { class: "step-counts" }, counts),
      html("span", { class: "step-bar" }, ...bars(step)),
      html("span", { class: "step-time" }, milliseconds(seconds)),
    );
  }

  tokenDetail(index) {
    const { origin } = this.run.tokens[index];
    if (origin === null) return null;
    const at = this.run.stepOfToken(index);
    if (at < 0) return [html("p", { class: "detail-title" }, originLabel(origin))];
    return stepDetail(originLabel(origin), this.run.steps[at], at + 1);
  }

  stepDetail(index) {
    const step = this.run.steps[index];
    const tokens = step.numEmitted === 1 ? "1 token" : `${step.numEmitted} tokens`;
    return stepDetail(tokens, step, index + 1);
  }

  mark(index) {
    this.unmark();
    const { firstToken, numEmitted } = this.run.steps[index];
    for (let i = firstToken; i < firstToken + numEmitted; i++) {
      this.output.children[i]?.classList.add("marked");
    }
  }

  unmark() {
    for (const token of this.output.querySelectorAll(".marked")) token.classList.remove("marked");
  }
}

/** What was accepted, then what was rejected, each by source. */
function bars({ drafted, accepted, sources }) {
  const bar = (isAccepted, source) => {
    const isIt = (token, i) => token.source === source && accepted.has(i + 1) === isAccepted;
    const part = html("span", { class: `origin-${source}${isAccepted ? " accepted" : ""}` });
    part.style.flexGrow = String(drafted.filter(isIt).length);
    return part;
  };
  return [true, false].flatMap((isAccepted) => sources.map((source) => bar(isAccepted, source)));
}
