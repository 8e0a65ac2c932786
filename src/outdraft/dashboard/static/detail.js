// What is shown about a token or a step under the pointer, or with the focus.

import { byId, html } from "./dom.js";
import { branches, visible } from "./draft.js";
import { milliseconds, number } from "./format.js";
import { sourcesInWords } from "./origins.js";

const GAP_PX = 8;
const MOST_BRANCHES = 8;

/** The one tooltip of the page. Escape hides it. */
export class Detail {
  constructor() {
    this.box = byId("detail");
    this.anchor = null;
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.hide();
    });
    const follow = () => this.place();
    document.addEventListener("scroll", follow, { capture: true, passive: true });
  }

  /**
   * Show details for the elements in `container` that `describe` knows.
   *
   * @param describe (element) => children, or null for an element without details.
   */
  bind(container, selector, describe) {
    const show = (event) => {
      const anchor = event.target.closest(selector);
      if (anchor) this.show(anchor, describe(anchor));
    };
    container.addEventListener("pointerover", show);
    container.addEventListener("focusin", show);
    container.addEventListener("pointerout", () => this.hide());
    container.addEventListener("focusout", () => this.hide());
  }

  show(anchor, children) {
    this.hide();
    if (!children) return;
    this.anchor = anchor;
    this.box.replaceChildren(...children);
    this.box.hidden = false;
    anchor.setAttribute("aria-describedby", this.box.id);
    this.place();
  }

  hide() {
    this.anchor?.removeAttribute("aria-describedby");
    this.anchor = null;
    this.box.hidden = true;
  }

  place() {
    const rect = this.anchor?.getClientRects()[0]; // of its first line
    if (!rect) return;
    const { width, height } = this.box.getBoundingClientRect();
    const right = document.documentElement.clientWidth - width - GAP_PX;
    const fits = rect.bottom + GAP_PX + height < window.innerHeight;
    const top = fits ? rect.bottom + GAP_PX : rect.top - GAP_PX - height;
    this.box.style.left = `${Math.max(GAP_PX, Math.min(rect.left, right))}px`;
    this.box.style.top = `${Math.max(GAP_PX, top)}px`;
  }
}

// Why nothing was drafted, by the reason that a trace names.
const WHY_OFF = {
  gain: "others of the batch drafted, or its draft was not sure enough",
  network_probe: "the drafter was tried on other requests",
  no_gain: "no gain expected",
  nothing_offered: "no source had a draft",
  no_room: "no room in the step",
  plain_probe: "plain decoding was measured",
  disabled: "too many requests run",
  not_wanted: "the request may not draft here",
};

/** "12.4 ms", and what was predicted if anything was. */
function timeInWords({ seconds, predicted = null, price = null }) {
  const parts = [milliseconds(seconds)];
  if (predicted !== null) parts.push(`predicted ${milliseconds(predicted)}`);
  if (price !== null) parts.push(`price ${number(price)}`);
  return parts.join(", ");
}

/** A step in words: "suffix: 3 of 5 accepted, 12.4 ms". */
export function describeStep(step) {
  const time = timeInWords(step);
  if (!step.drafted.length) {
    const why = WHY_OFF[step.reason];
    return `nothing drafted${why ? ` (${why})` : ""}, ${time}`;
  }
  const counts = `${step.accepted.size} of ${step.drafted.length} accepted`;
  return `${sourcesInWords(step.sources)}: ${counts}, ${time}`;
}

/** The contents of the tooltip: a title, the step in words, and its guesses. */
export function stepDetail(title, step, number) {
  return [
    html("p", { class: "detail-title" }, title),
    html("p", { class: "detail-step" }, `Step ${number}, ${describeStep(step)}`),
    ...(step.drafted.length ? [guesses(step)] : []),
  ];
}

function guesses(step) {
  const paths = branches(step);
  const list = html("ul", { class: "branches" });
  for (const path of paths.slice(0, MOST_BRANCHES)) list.append(branch(path));
  const more = paths.length - MOST_BRANCHES;
  if (more > 0) list.append(html("li", { class: "more" }, `and ${more} more branches`));
  return list;
}

function branch(path) {
  const kept = path.filter(({ accepted }) => accepted);
  const rejected = path.filter(({ accepted }) => !accepted);
  const begin = marked("ins", "token ", "accepted: ", kept);
  return html("li", {}, ...begin, ...marked("del", "", " rejected: ", rejected));
}

/** Tokens as elements of their own, after a word for those who cannot see how they look. */
function marked(tag, look, word, tokens) {
  if (!tokens.length) return [];
  const elements = tokens.map(({ text, source }) =>
    html(tag, { class: `${look}origin-${source}` }, visible(text)),
  );
  return [html("span", { class: "hidden" }, word), ...elements];
}
