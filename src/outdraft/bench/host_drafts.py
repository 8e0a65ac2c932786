"""What drafts of the host cost: microseconds a request and step, on a made text.

The text is made of phrases that come again, as with edits and agents: most steps find a match.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from outdraft.config.speculation import SourceConfig
from outdraft.core.draft import Draft, DraftAsk
from outdraft.kernels.ops import Kernels
from outdraft.loading.methods import host_proposers

MAX_TOKENS = 8
VOCABULARY = 32_000
LONG_CONTEXT = 32_768
NUM_STEPS = 100


def make_phrases(rng: np.random.Generator, context_len: int) -> list[np.ndarray]:
    """Phrases of a text of that length: int [40] each."""
    return [rng.integers(0, VOCABULARY, 40) for _ in range(max(8, context_len // 200))]


def phrases_text(rng: np.random.Generator, phrases: list[np.ndarray], length: int) -> np.ndarray:
    """Phrases in random order, cut short at random: int32 [length]."""
    pieces: list[np.ndarray] = []
    missing = length
    while missing > 0:
        phrase = phrases[rng.integers(len(phrases))]
        pieces.append(phrase[: rng.integers(2, len(phrase))])
        missing -= len(pieces[-1])
    return np.concatenate(pieces)[:length].astype(np.int32)


def measure(
    propose: Callable[[Sequence[DraftAsk]], list[Draft]],
    texts: list[np.ndarray],
    context_len: int,
    num_steps: int,
) -> dict[str, list[float]]:
    """Per step: microseconds a request, and tokens drafted a request; the prompt's first."""
    rng = np.random.default_rng(1)
    lengths = [context_len] * len(texts)
    times_us: list[float] = []
    drafted: list[float] = []
    for _ in range(num_steps + 1):
        asks = [
            DraftAsk(str(i), text[:length], MAX_TOKENS)
            for i, (text, length) in enumerate(zip(texts, lengths, strict=True))
        ]
        start_s = time.perf_counter()
        drafts = propose(asks)
        times_us.append((time.perf_counter() - start_s) * 1e6 / len(texts))
        drafted.append(sum(map(len, drafts)) / len(texts))
        lengths = [length + int(rng.integers(1, 6)) for length in lengths]
    return {"times_us": times_us, "drafted": drafted}


def draft_us_per_request_32k(sources: Sequence[SourceConfig], kernels: Kernels) -> float | None:
    """Median time of a step's draft for one request of 32k tokens; None if a network drafts too."""
    proposers = host_proposers(sources, kernels)
    if len(proposers) < len(sources):
        return None

    def propose(asks: Sequence[DraftAsk]) -> list[Draft]:
        return [draft for proposer in proposers for draft in proposer.propose(asks)]

    rng = np.random.default_rng(0)
    phrases = make_phrases(rng, LONG_CONTEXT)
    text = phrases_text(rng, phrases, LONG_CONTEXT + 5 * NUM_STEPS + 5)
    return statistics.median(measure(propose, [text], LONG_CONTEXT, NUM_STEPS)["times_us"][1:])
