// Which part of the answer each token is.
//
// A token decoded on its own may lack the space before it, or be half a character. The answer has
// both, but it may come a little later than its tokens.

const MOST_LATE = 8; // tokens that wait for their text before they get what there is
const HALF_CHARACTER = "\ufffd";

/** Takes texts and tokens as they come; gives tokens whose texts add up to the answer. */
export class Aligner {
  constructor() {
    this.rest = ""; // of the answer: not yet given to a token
    this.waiting = [];
  }

  /** @returns the tokens that are settled, in order, with their parts of the answer as `text`. */
  push(text, tokens) {
    this.rest += text;
    this.waiting.push(...tokens);
    const settled = [];
    for (let found = this.find(); found; found = this.find()) {
      settled.push(...this.settle(found.index, found.start, found.end));
    }
    if (this.rest && this.waiting.length > MOST_LATE) {
      settled.push(...this.settle(this.waiting.length - 1, 0, this.rest.length));
    }
    return settled;
  }

  /** The answer is complete: what is left of it, then the tokens that have no part of it. */
  finish() {
    if (!this.rest) return this.waiting.splice(0); // such as the token that ends a text
    if (!this.waiting.length) this.waiting.push({ text: "", origin: null });
    return this.settle(this.waiting.length - 1, 0, this.rest.length);
  }

  /** The first waiting token that can be found in the rest, and where. */
  find() {
    for (const [index, { text }] of this.waiting.entries()) {
      if (!text || text.includes(HALF_CHARACTER)) continue;
      const start = this.rest.indexOf(text);
      const isNext = start >= 0 && !this.rest.slice(0, start).trim();
      if (isNext || (start >= 0 && index > 0)) return { index, start, end: start + text.length };
    }
    return null;
  }

  /** Give the rest up to `end` away: to the token at `index` what begins at `start`. */
  settle(index, start, end) {
    const settled = this.waiting.splice(0, index + 1).map((token) => ({ ...token, text: "" }));
    const before = this.rest.slice(0, start);
    const own = this.rest.slice(start, end);
    if (before.trim() && index > 0) {
      settled[index - 1].text = before;
      settled[index].text = own;
    } else {
      settled[index].text = before + own;
    }
    this.rest = this.rest.slice(end);
    return settled;
  }
}
