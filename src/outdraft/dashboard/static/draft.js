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

/** A token's text with what is invisible made visible. */
export function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
}
