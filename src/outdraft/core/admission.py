"""A request that gets a slot, as the runner sees it: numbers and arrays only.

A drafter that reads the target's states can only read where they are. States of tokens that were
computed while no request drafted are nowhere. So the drafter goes on after a gap: for it, the text
after the gap follows right on the text before. Its keys have other places than the target's then,
in the same blocks. The text that a drafter sees changes its drafts, never the output.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from outdraft.core.sampling import SamplingParams


class DrafterGap(Struct, array_like=True, frozen=True):
    """All that the drafter lacks of one text, as one gap.

    Attributes:
        num_tokens: how much further ahead a token stands in the text than in the drafter's cache.
        before: ids of the blocks that the drafter reads before the gap; all of them are full.
        next_block: place, in the request's table, of the block that is the next one for the
            drafter.
    """

    num_tokens: int = 0
    before: tuple[int, ...] = ()
    next_block: int = 0

    def blocks(self, block_ids: Sequence[int]) -> Sequence[int]:
        """The drafter's blocks, of a request that has `block_ids`."""
        if self.num_tokens == 0:
            return block_ids
        return [*self.before, *block_ids[self.next_block :]]

    def widened(
        self, num_read: int, start: int, block_ids: Sequence[int], block_size: int
    ) -> "DrafterGap":
        """The gap of a drafter that has read num_read tokens and goes on at `start` >= num_read.

        Only the full blocks of those num_read tokens stay.
        """
        num_full = (num_read - self.num_tokens) // block_size
        before = tuple(self.blocks(block_ids)[:num_full])
        return DrafterGap(start - num_full * block_size, before, start // block_size)


NO_GAP = DrafterGap()


class TokenRules(Struct, array_like=True, frozen=True, kw_only=True):
    """Rules for choosing the tokens of one request, and for reporting on them.

    Attributes:
        seed: the noise key of every choice.
        has_own_seed: the request asked for a seed, so that its ids must depend on no draft.
        top_k: 0 or -1: all tokens.
        stop_ids: the tokens that min_tokens forbids; () if it is 0.
        bad_words: token ids of each word, none of them empty.
        allowed_token_ids: (): all.
        has_grammar: a mask of its allowed tokens comes with each step.
        logprobs, prompt_logprobs: number at each position; None: none, 0: of the token alone.
        is_traced: log-probabilities of drafted tokens are reported too.
    """

    seed: int
    has_own_seed: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    has_grammar: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    is_traced: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        added = self.presence_penalty, self.frequency_penalty
        return any(added) or self.repetition_penalty != 1.0


def token_rules(
    params: SamplingParams,
    *,
    seed: int,
    stop_token_ids: Iterable[int] = (),
    bad_words_ids: Sequence[Sequence[int]] = (),
) -> TokenRules:
    """The part of a request's parameters that the runner needs, and values derived from them.

    Args:
        seed: the resolved one.
        stop_token_ids: end-of-sequence and stop tokens.
        bad_words_ids: token ids of `params.bad_words`.
    """
    bias = params.logit_bias or {}
    return TokenRules(
        seed=seed,
        has_own_seed=params.seed is not None,
        temperature=float(params.temperature),
        top_k=params.top_k,
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        min_tokens=params.min_tokens,
        stop_ids=tuple(sorted(stop_token_ids)) if params.min_tokens > 0 else (),
        bad_words=tuple(tuple(word) for word in bad_words_ids),
        allowed_token_ids=tuple(params.allowed_token_ids or ()),
        logit_bias=tuple((token_id, float(value)) for token_id, value in bias.items()),
        has_grammar=params.structured is not None,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        is_traced=params.speculation.trace,
    )


class Admission(Struct, array_like=True, frozen=True, eq=False):
    """A request gets a slot, and has it until the slot's next admission.

    The slot has no blocks yet, and its drafter no gap: works name them.

    Attributes:
        slot: row of the device's state.
        token_ids: int32 [num_tokens], the text so far: more than the prompt after a preemption.
    """

    slot: int
    token_ids: np.ndarray
    num_prompt: int
    rules: TokenRules
