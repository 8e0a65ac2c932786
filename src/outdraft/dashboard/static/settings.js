// The settings beside the prompt, as parts of a request.

import { byId, html } from "./dom.js";
import { originLabel } from "./origins.js";

/** Fill in what the engine offers. */
export function showFacts(facts) {
  const options = facts.speculation_methods.map((name) =>
    html("option", { value: name }, originLabel(name)),
  );
  const select = byId("method");
  const chosen = select.value;
  select.replaceChildren(select.options[0], ...options);
  select.value = facts.speculation_methods.includes(chosen) ? chosen : "";
  const number = byId("num-speculative-tokens");
  number.max = facts.num_speculative_tokens;
  number.placeholder = `engine’s number, up to ${facts.num_speculative_tokens}`;
  const isOff = !facts.speculation_methods.length;
  byId("speculation").disabled = isOff;
  byId("speculation-off").hidden = !isOff;
  byId("speculation-lossy").hidden = facts.lossless;
}

/** The fields that a request with speculation and the same one without it share. */
export function samplingFields() {
  const temperature = byId("temperature").valueAsNumber;
  // A seed makes the two runs of a comparison choose with the same noise.
  const seed = temperature > 0 ? { seed: Math.floor(Math.random() * 2 ** 31) } : {};
  return { temperature, max_tokens: byId("max-tokens").valueAsNumber, ...seed };
}

/** The fields that say how to speculate. */
export function speculationFields() {
  if (!isSpeculating()) return withoutSpeculation();
  const method = byId("method").value;
  const number = byId("num-speculative-tokens").value;
  const prediction = byId("prediction").value;
  return {
    speculation: {
      trace: true,
      ...(method && { method }),
      ...(number && { num_speculative_tokens: Number(number) }),
    },
    ...(prediction && { prediction: { type: "content", content: prediction } }),
  };
}

export function withoutSpeculation() {
  return { speculation: { enabled: false, trace: true } };
}

/** Both runs of a comparison read the whole prompt: the second finds no blocks of the first. */
export function coldCache() {
  return { cache_salt: String(Math.random()) };
}

export function isSpeculating() {
  return byId("enabled").checked && !byId("speculation").disabled;
}

export function isComparing() {
  return isSpeculating() && byId("compare").checked;
}

/** Whether to ask how likely each guess was: never while times are measured. */
export function wantsProbabilities() {
  return byId("probabilities").checked && !isComparing();
}

/** Whether sampled texts have the model's own distribution. */
export function isLossless() {
  return byId("speculation-lossy").hidden;
}

/** What depends on whether speculation is on is out of reach while it is off. */
export function bindSettings() {
  const enabled = byId("enabled");
  const dependent = ["compare", "method", "num-speculative-tokens", "prediction"].map(byId);
  enabled.addEventListener("change", () => {
    for (const input of dependent) input.disabled = !enabled.checked;
  });
}
