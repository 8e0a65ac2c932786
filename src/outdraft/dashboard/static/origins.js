// How a token can have come about. Each origin has its colour and its line in origins.css.

export const ORIGINS = [
  ["plain", "Plain", "Nothing was drafted: one token in one step of the model."],
  ["prediction", "Prediction", "Guessed from the prediction that came with the request."],
  ["suffix", "Suffix", "Guessed from a longer match in this text or in earlier ones."],
  ["ngram", "N-gram", "Guessed from the same few tokens earlier in this text."],
  ["draft_model", "Draft model", "Guessed by the small model."],
  ["bonus", "Bonus", "The model’s own token behind a draft that it accepted whole."],
  ["recovered", "Recovered", "The model’s own token where it rejected a guess."],
].map(([name, label, meaning]) => ({ name, label, meaning }));

const LABELS = new Map(ORIGINS.map(({ name, label }) => [name, label]));

/** The label of an origin or of a draft's source; an unknown name is its own label. */
export function originLabel(name) {
  return LABELS.get(name) ?? name;
}

export function isKnownOrigin(name) {
  return LABELS.has(name);
}
