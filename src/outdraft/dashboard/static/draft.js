// A draft as branches: what was guessed, and which of it was kept.

/**
 * Every path from the root to a leaf, the one with the most accepted guesses first.
 *
 * @param step a step as decodeChunk gives it.
 * @returns {{text: string, source: string, accepted: boolean}[][]}
 */
export function branches(step) {
  const isParent = new Set(step.parents);
  const paths = [];
  for (let row = step.drafted.length; row >= 1; row--) {
    if (!isParent.has(row)) paths.push(pathTo(step, row));
  }
  const kept = (path) => path.filter(({ accepted }) => accepted).length;
  return paths.reverse().sort((left, right) => kept(right) - kept(left));
}

function pathTo(step, leaf) {
  const path = [];
  for (let row = leaf; row > 0; row = step.parents[row - 1]) {
    path.unshift({ ...step.drafted[row - 1], accepted: step.accepted.has(row) });
  }
  return path;
}

/**
 * Where each row of a step is drawn: level by level to the right, the accepted path along the top.
 *
 * Row 0 is the last token before the draft. Behind the accepted rows comes the model's own token,
 * if the text went on to it.
 *
 * @param before the text of row 0. @param own the model's own token, or null.
 * @returns {{row: number | null, parent: number | null, level: number, line: number, text: string,
 *            origin: string | null, state: string, logprob?: number}[]} `parent` is a place in this
 *          list, `line` counts from the top, `state` is "root", "accepted", "rejected" or "own"; a
 *          parent comes before its children.
 */
export function layOut(step, before, own) {
  const children = Array.from({ length: step.drafted.length + 1 }, () => []);
  for (const [i, parent] of step.parents.entries()) children[parent].push(i + 1);
  const isAccepted = (row) => step.accepted.has(row);
  const nodes = [];
  let numLines = 0;

  /** Place a row and all behind it; its first child goes on in its line. */
  const place = (row, parent, level, line) => {
    const drafted = row === 0 ? { text: before, source: null } : step.drafted[row - 1];
    const { text, source, logprob } = drafted;
    const state = row === 0 ? "root" : isAccepted(row) ? "accepted" : "rejected";
    const at = nodes.push({ row, parent, level, line, text, origin: source, state, logprob }) - 1;
    const next = children[row].toSorted((a, b) => isAccepted(b) - isAccepted(a) || a - b);
    const isLastKept = state !== "rejected" && !next.some(isAccepted);
    let isFirst = true;
    const lineOfNext = () => (isFirst ? ((isFirst = false), line) : ++numLines);
    if (isLastKept && own) {
      const place = { row: null, parent: at, level: level + 1, line: lineOfNext(), state: "own" };
      nodes.push({ ...place, text: own.text, origin: own.origin, logprob: own.logprob });
    }
    for (const child of next) place(child, at, level + 1, lineOfNext());
  };

  place(0, null, 0, 0);
  return nodes;
}

/** A token's text with what is invisible made visible. */
export function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
}
