// One run on the page: its text and its figures.

import { stepDetail } from "./detail.js";
import { html, rovingFocus } from "./dom.js";
import { duration, number } from "./format.js";
import { isKnownOrigin, ORIGINS, originLabel } from "./origins.js";

const FIGURES = [
  ["First token", "ttft", (run) => duration(run.ttft)],
  ["Tokens/s", "rate", (run) => number(run.rate)],
  ["Total", "total", (run) => duration(run.total)],
  ["Tokens", "tokens", (run) => number(run.numTokens)],
  ["Tokens a step", "per-step", (run) => number(run.tokensPerStep)],
  ["Accepted", "accepted", (run) => (run.drafted ? `${run.accepted} of ${run.drafted}` : "–")],
];

const ENDS = { stop: "finished", length: "stopped at max tokens" };
const NEAR_END_PX = 40;

export class Pane {
  /** @param run the Run to show. @param detail the page's Detail. */
  constructor(run, title, detail) {
    this.run = run;
    this.title = title;
    this.state = html("span", { class: "pane-state" }, "waiting");
    this.output = html("div", {
      class: "output",
      role: "group",
      "aria-label": `${title}: text. Arrow keys go through the tokens.`,
    });
    this.mix = html("div", { class: "mix", role: "img", "aria-label": "No tokens yet" });
    this.figures = html("dl", { class: "figures" });
    this.problem = html("p", { class: "problem", role: "alert", hidden: true });
    this.element = html(
      "section",
      { class: "pane", "aria-label": title },
      html("header", { class: "pane-head" }, html("h3", {}, title), this.state),
      this.output,
      this.problem,
      this.mix,
      this.figures,
    );
    this.shownTokens = 0;
    this.visibleTokens = 0; // fewer while a race is replayed
    rovingFocus(this.output, ".token:not(:empty):not(.unseen)");
    detail.bind(this.output, ".token", (token) => this.tokenDetail(Number(token.dataset.index)));
    this.update();
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
    const { tokens } = this.run;
    this.follow(() => {
      for (; this.shownTokens < tokens.length; this.shownTokens++) {
        this.output.append(this.token(tokens[this.shownTokens], this.shownTokens));
      }
    });
    this.visibleTokens = this.shownTokens;
    this.updateMix();
    const figures = FIGURES.map(([label, name, value]) =>
      html("div", { "data-figure": name }, html("dt", {}, label), html("dd", {}, value(this.run))),
    );
    this.figures.replaceChildren(...figures);
  }

  /** Hide all tokens but the first ones, of which the newest is in view; nothing else moves. */
  showFirst(number) {
    const tokens = this.output.children;
    const [from, to] = [this.visibleTokens, number].sort((left, right) => left - right);
    for (let i = from; i < to; i++) tokens[i].classList.toggle("unseen", i >= number);
    this.visibleTokens = number;
    const { scrollTop, clientHeight } = this.output;
    const newest = tokens[number - 1];
    const bottom = newest ? newest.offsetTop + newest.offsetHeight : 0;
    if (bottom > scrollTop + clientHeight) this.output.scrollTop = bottom - clientHeight;
    if (bottom < scrollTop) this.output.scrollTop = bottom - clientHeight / 2;
  }

  /** A text longer than its box stays at its end, unless somebody reads further up. */
  follow(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.output;
    const atEnd = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    change();
    if (atEnd) this.output.scrollTop = this.output.scrollHeight;
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

  tokenDetail(index) {
    const { origin } = this.run.tokens[index];
    if (origin === null) return null;
    const at = this.run.stepOfToken(index);
    if (at < 0) return [html("p", { class: "detail-title" }, originLabel(origin))];
    return stepDetail(originLabel(origin), this.run.steps[at], at + 1);
  }

  /** Frame the tokens of a step; null: of none. */
  mark(step) {
    const isOf = (i) => step && step.firstToken <= i && i < step.firstToken + step.numEmitted;
    for (const [i, token] of [...this.output.children].entries()) {
      token.classList.toggle("marked", Boolean(isOf(i)));
    }
  }

  /** The text as it was behind a step: what came later fades; the step's tokens are in view. */
  fadeBehind({ firstToken, numEmitted }) {
    const tokens = [...this.output.children];
    for (const [i, token] of tokens.entries()) {
      token.classList.toggle("later", i >= firstToken + numEmitted);
    }
    const token = tokens[firstToken];
    if (!token) return;
    const { top } = this.output.getBoundingClientRect();
    const below = token.getBoundingClientRect().top - top - this.output.clientHeight / 2;
    this.output.scrollTop += below;
  }
}
