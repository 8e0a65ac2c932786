"""What a step of the engine brought: outputs are assembled from it, beside the engine or elsewhere.

Plain values only: they cross the wire as they are.
"""

from msgspec import Struct

from outdraft.core.outputs import DraftTrace, TokenOrigin
from outdraft.core.plan import TokenLogprobs


class SequenceDelta(Struct, frozen=True):
    """What one of a request's n sequences gained in a step.

    Attributes:
        origins: one per token of token_ids.
        drafted: tokens that the step verified, by source; None: there was no draft.
        logprobs: one per token, if the request asked; there may be more of the most likely tokens
            than it asked for.
        trace: if the request asked for it.
        finish_reason: a core.request.FinishReason, if the sequence ended.
        stop_reason: the stop token that ended it, if one did. The engine knows no stop strings.
        error: what went wrong, if it ended with FinishReason.ERROR.
    """

    index: int
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    drafted: dict[str, int] | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    trace: DraftTrace | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None


class RequestDelta(Struct, frozen=True):
    """What one request gained in a step; times and counts are those of the whole request so far."""

    request_id: str
    sequences: tuple[SequenceDelta, ...]  # those that gained tokens, or failed
    first_scheduled_s: float  # of the monotonic clock, which all processes of a machine share
    num_cached_tokens: int  # prompt tokens that the prefix cache supplied
    num_preemptions: int
    num_spec_tokens: int  # most drafts a step
    lossless: bool  # the output has the target's own distribution
    # of all prompt tokens but the first, if the request asked; with the first token of its first
    # sequence
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
