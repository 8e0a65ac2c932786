// The steps of a run, one at a time: a slider goes through them, the step's tree is drawn below.

import { describeStep, stepDetail } from "./detail.js";
import { html, rovingFocus } from "./dom.js";
import { milliseconds } from "./format.js";
import { sourcesInWords } from "./origins.js";
import { drawTree } from "./tree.js";

export class Explorer {
  /** @param pane the Pane whose run is explored. @param detail the page's Detail. */
  constructor(pane, title, detail) {
    this.pane = pane;
    this.run = pane.run;
    this.shown = 0; // steps that have a box
    this.selected = null; // index of the step whose tree is drawn
    this.slider = html("input", {
      type: "range",
      class: "scrubber",
      min: 1,
      max: 1,
      step: 1,
      "aria-label": `${title}: step`,
    });
    this.back = html("button", { type: "button", class: "stepper", "aria-label": "Previous step" });
    this.back.append("‹");
    this.next = html("button", { type: "button", class: "stepper", "aria-label": "Next step" }, "›");
    this.caption = html("p", { class: "step-caption" });
    this.tree = html("div", {
      class: "tree",
      role: "group",
      tabindex: 0,
      "aria-label": `${title}: tree of the step`,
    });
    this.count = html("span", { class: "count" }, "0");
    this.list = html("ol", { class: "steps", "aria-label": `${title}: steps` });
    this.viewer = html(
      "div",
      { class: "viewer", hidden: true },
      html("div", { class: "scrub" }, this.back, this.slider, this.next),
      this.caption,
      this.tree,
    );
    this.element = html(
      "section",
      { class: "explorer", "aria-label": `${title}: steps` },
      html("h3", { class: "steps-head" }, "Steps ", this.count),
      this.viewer,
      this.list,
    );
    this.bind(detail);
  }

  bind(detail) {
    rovingFocus(this.list, ".step");
    detail.bind(this.list, ".step", (step) => this.stepDetail(Number(step.dataset.index)));
    for (const [enter, leave] of [
      ["pointerover", "pointerout"],
      ["focusin", "focusout"],
    ]) {
      this.list.addEventListener(enter, (event) => {
        const step = event.target.closest(".step");
        if (step) this.pane.mark(this.run.steps[Number(step.dataset.index)]);
      });
      this.list.addEventListener(leave, () => this.markSelected());
    }
    const choose = (event) => {
      const step = event.target.closest(".step");
      if (step) this.select(Number(step.dataset.index));
    };
    this.list.addEventListener("click", choose);
    this.list.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choose(event);
    });
    this.slider.addEventListener("input", () => this.select(this.slider.valueAsNumber - 1));
    this.back.addEventListener("click", () => this.select(this.selected - 1));
    this.next.addEventListener("click", () => this.select(this.selected + 1));
  }

  /** Show what has come since the last call. */
  update() {
    const { steps } = this.run;
    for (; this.shown < steps.length; this.shown++) {
      this.list.append(box(steps[this.shown], this.shown));
    }
    this.count.textContent = String(steps.length);
  }

  /** The run has ended: its steps can be gone through. */
  open() {
    const { steps } = this.run;
    if (!steps.length) return;
    this.slider.max = steps.length;
    this.viewer.hidden = false;
    this.show(steps.length - 1);
  }

  /** The visitor goes to a step: the text behind it fades. */
  select(index) {
    this.show(index);
    this.pane.fadeBehind(this.run.steps[this.selected]);
    this.markSelected();
  }

  show(index) {
    const { steps, traced } = this.run;
    if (this.viewer.hidden) return;
    this.selected = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[this.selected];
    const own = step.firstToken + step.accepted.size;
    const hasOwn = step.accepted.size < step.numEmitted;
    const before = traced[step.firstToken - 1]?.text ?? "the prompt";
    this.tree.replaceChildren(drawTree(step, before, hasOwn ? (traced[own] ?? null) : null));
    this.tree.scrollTo(0, 0);
    const words = `Step ${this.selected + 1} of ${steps.length}, ${describeStep(step)}`;
    this.caption.textContent = words;
    this.slider.value = this.selected + 1;
    this.slider.setAttribute("aria-valuetext", words);
    this.back.disabled = this.selected === 0;
    this.next.disabled = this.selected === steps.length - 1;
    for (const [i, each] of [...this.list.children].entries()) {
      if (i === this.selected) each.setAttribute("aria-current", "step");
      else each.removeAttribute("aria-current");
    }
  }

  markSelected() {
    this.pane.mark(this.selected === null ? null : this.run.steps[this.selected]);
  }

  stepDetail(index) {
    const step = this.run.steps[index];
    const tokens = step.numEmitted === 1 ? "1 token" : `${step.numEmitted} tokens`;
    return stepDetail(tokens, step, index + 1);
  }
}

function box(step, index) {
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
