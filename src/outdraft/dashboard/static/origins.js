// How a token can have come about. Each origin has its colour and its line in origins.css.

export const ORIGINS = [
  ["plain", "Plain", "Nothing was drafted: one token in one step of the model."],
  ["prediction", "Prediction", "Guessed from the prediction that came with the request."],
  ["suffix", "Suffix", "Guessed from a longer match in this text or in earlier ones."],
  ["ngram", "N-gram", "Guessed from the same few tokens earlier in this text."],
  ["draft_model", "Draft model", "Guessed by the small model."],
  ["eagle", "EAGLE", "Guessed by an EAGLE head from what the model had in mind."],
  ["eagle3", "EAGLE-3", "Guessed by an EAGLE-3 head from several layers of the model."],
  ["medusa", "Medusa", "Guessed by one of the Medusa heads on the model’s last layer."],
  ["mlp_speculator", "MLP speculator", "Guessed by a small network on the model’s last layer."],
  ["dflash", "DFlash", "Guessed as part of a block, in one pass of a DFlash network."],
  ["dspark", "DSpark", "Guessed as part of a block, word after word, by a DSpark network."],
  ["mtp", "MTP", "Guessed by a layer that the model was trained with to look further ahead."],
  ["self", "Self", "Guessed by the model itself, with fewer bits or less of the text."],
  ["bonus", "Bonus", "The model’s own token behind a draft that it accepted whole."],
  ["recovered", "Recovered", "The model’s own token where it rejected a guess."],
].map(([name, label, meaning]) => ({ name, label, meaning }));

const TARGET_ORIGINS = ["plain", "bonus", "recovered"]; // the model's own choices
const LABELS = new Map(ORIGINS.map(({ name, label }) => [name, label]));

/** The label of an origin or of a draft's source; an unknown name is its own label. */
export function originLabel(name) {
  return LABELS.get(name) ?? name;
}

export function isKnownOrigin(name) {
  return LABELS.has(name);
}

/** The origins that the tokens of an engine with these sources can have. */
export function originsWith(sources) {
  return ORIGINS.filter(({ name }) => TARGET_ORIGINS.includes(name) || sources.includes(name));
}

/** The sources of a draft within a sentence: "suffix, draft model"; acronyms stay as they are. */
export function sourcesInWords(sources) {
  const inWords = (label) => label.replace(/^[A-Z](?=[a-z-])/, (first) => first.toLowerCase());
  return sources.map((name) => inWords(originLabel(name))).join(", ");
}
