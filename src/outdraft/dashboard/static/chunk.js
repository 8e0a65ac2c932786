// The one place that knows how a streamed chunk of the API looks.

/**
 * What one chunk of /v1/completions or /v1/chat/completions says about the first choice.
 *
 * A server without a trace sends text only; its tokens have no origin (null). Log-probabilities are
 * there if the request asked for them.
 *
 * @returns {{
 *   text: string,
 *   tokens: {text: string, origin: string | null, logprob?: number}[],
 *   steps: {sources: string[], drafted: {text: string, source: string, logprob?: number}[],
 *           parents: number[], accepted: Set<number>, numEmitted: number, seconds: number,
 *           reason: string | null, granted: number | null, predicted: number | null,
 *           price: number | null}[],
 *   finishReason: string | null,
 *   usage: object | null,
 *   error: string | null,
 * }}
 */
export function decodeChunk(chunk) {
  const choice = chunk.choices?.find(({ index }) => (index ?? 0) === 0) ?? {};
  const text = choice.delta?.content ?? choice.text ?? "";
  const trace = choice.outdraft ?? {};
  const untraced = text ? [{ text, origin: null }] : [];
  return {
    text,
    tokens: trace.tokens ? withLogprobs(trace.tokens, choice.logprobs) : untraced,
    steps: (trace.steps ?? []).map(decodeStep),
    finishReason: choice.finish_reason ?? null,
    usage: chunk.usage ?? null,
    error: chunk.error ? (chunk.error.message ?? "the stream ended with an error") : null,
  };
}

/** A completion has its log-probabilities in one list, a chat in one object per token. */
function withLogprobs(tokens, logprobs) {
  const values = logprobs?.token_logprobs ?? logprobs?.content?.map(({ logprob }) => logprob);
  if (values?.length !== tokens.length) return tokens;
  return tokens.map((token, i) => ({ ...token, logprob: values[i] }));
}

/**
 * A row is the number of a drafted token plus one: row 0 is the last token before the draft.
 * Parents are rows, accepted_rows are numbers of drafted tokens; a chain may leave parents out.
 * One source may go on where another ended: `sources` has each once, who drafted first comes first.
 */
function decodeStep(step) {
  const drafted = (step.drafted ?? []).map(({ text, source, logprob }) => {
    return { text, source, ...(Number.isFinite(logprob) && { logprob }) };
  });
  const chain = drafted.map((_, row) => row);
  return {
    sources: [...new Set(drafted.map(({ source }) => source))],
    drafted,
    parents: step.parents?.length ? step.parents : chain,
    accepted: new Set((step.accepted_rows ?? []).map((drafted) => drafted + 1)),
    numEmitted: step.num_emitted,
    seconds: step.seconds,
    reason: step.reason ?? null,
    granted: step.granted ?? null,
    predicted: step.predicted_seconds ?? null,
    price: step.price ?? null,
  };
}
