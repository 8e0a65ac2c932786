// One request while it runs: what came, and when. Knows nothing of the page.

import { Aligner } from "./align.js";

export class Run {
  /** @param now seconds of a clock that only grows. */
  constructor(now = () => performance.now() / 1000) {
    this.now = now;
    this.text = "";
    this.tokens = []; // their texts add up to the text
    this.traced = []; // the tokens as they came, each decoded alone
    this.arrivals = []; // {atS, numTokens}: how many tokens were there, seconds after the start
    this.aligner = new Aligner();
    this.steps = []; // {..., firstToken}: the first of numEmitted tokens
    this.finishReason = null;
    this.usage = null;
    this.startS = null;
    this.firstS = null;
    this.lastS = null;
    this.firstTokens = 0; // in the first chunk that had any
    this.numStepped = 0; // tokens of all steps so far
  }

  start() {
    this.startS = this.now();
  }

  /** Take a decoded chunk in. */
  add(chunk) {
    this.text += chunk.text;
    this.tokens.push(...this.aligner.push(chunk.text, chunk.tokens));
    this.traced.push(...chunk.tokens);
    for (const step of chunk.steps) {
      this.steps.push({ ...step, firstToken: this.numStepped });
      this.numStepped += step.numEmitted;
    }
    this.finishReason = chunk.finishReason ?? this.finishReason;
    this.usage = chunk.usage ?? this.usage;
    if (!chunk.tokens.length) return;
    this.lastS = this.now();
    this.arrivals.push({ atS: this.total, numTokens: this.tokens.length });
    if (this.firstS === null) {
      this.firstS = this.lastS;
      this.firstTokens = chunk.tokens.length;
    }
  }

  /** Nothing more will come. */
  finish() {
    this.tokens.push(...this.aligner.finish());
    if (this.arrivals.length) this.arrivals.at(-1).numTokens = this.tokens.length;
  }

  /** How many of its tokens were there, so many seconds after the start. */
  tokensAt(seconds) {
    return this.arrivals.findLast(({ atS }) => atS <= seconds)?.numTokens ?? 0;
  }

  /** Index of the step that a token came from, -1 if no trace tells. */
  stepOfToken(index) {
    return this.steps.findIndex(
      ({ firstToken, numEmitted }) => firstToken <= index && index < firstToken + numEmitted,
    );
  }

  get numTokens() {
    return this.usage?.completion_tokens ?? this.traced.length;
  }

  get ttft() {
    return this.firstS === null ? null : this.firstS - this.startS;
  }

  get total() {
    return this.lastS === null ? null : this.lastS - this.startS;
  }

  /** Tokens a second behind the first ones, which wait for the prompt. */
  get rate() {
    const seconds = this.lastS - this.firstS;
    return seconds > 0 ? (this.numTokens - this.firstTokens) / seconds : null;
  }

  get drafted() {
    return this.steps.reduce((sum, { drafted }) => sum + drafted.length, 0);
  }

  get accepted() {
    return this.steps.reduce((sum, { accepted }) => sum + accepted.size, 0);
  }

  /** Tokens a step of the model, over the steps that emitted any. */
  get tokensPerStep() {
    const emitting = this.steps.filter(({ numEmitted }) => numEmitted > 0);
    return emitting.length ? this.numStepped / emitting.length : null;
  }
}

/** Where two texts part, counted in characters; null if they are the same. */
export function firstDifference(left, right) {
  if (left === right) return null;
  let at = 0;
  while (at < left.length && left[at] === right[at]) at++;
  return at;
}
