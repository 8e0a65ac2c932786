// Numbers for people.

/** Three digits or so, without a needless fraction: 0.12, 1.23, 12.3, 123, 1,230. */
export function number(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toFixed(size >= 10 ? 1 : 2);
}

export function milliseconds(seconds) {
  return seconds === null ? "–" : `${number(seconds * 1000)} ms`;
}

/** Seconds, or milliseconds below one. */
export function duration(seconds) {
  if (seconds === null) return "–";
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${number(seconds)} s`;
}

export function percent(share) {
  return share === null || !Number.isFinite(share) ? "–" : `${Math.round(share * 100)} %`;
}

/** A probability from its natural logarithm; small ones are not rounded to nothing. */
export function probability(logprob) {
  const share = Math.exp(logprob);
  if (share < 0.01) return share < 0.001 ? "<0.1 %" : `${(share * 100).toFixed(1)} %`;
  return share < 1 && share > 0.995 ? ">99 %" : percent(share);
}
