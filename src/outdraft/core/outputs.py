"""A request's results with vLLM's names, the source of each token, and the gain of a step.

Deltas are plain values: they cross the wire as they are.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TypeVar

from msgspec import Struct

from outdraft.core.decision import Decision
from outdraft.core.plan import TokenLogprobs

Item = TypeVar("Item")
Value = TypeVar("Value", "CompletionOutput", "SpeculationMetrics")


class TargetChoice(StrEnum):
    """The origin of a token that the target chose itself; that of an accepted draft is its
    DraftSource."""

    PLAIN = "plain"  # nothing was drafted in that step
    RECOVERED = "recovered"  # where it rejected a draft
    BONUS = "bonus"  # after a draft that it accepted whole


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's raw probability; rank 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class DraftTrace:
    """One step of a sequence: its drafts, and those that were accepted."""

    sources: tuple[str, ...]  # of each drafted token; empty: nothing was drafted
    drafted_ids: tuple[int, ...]  # in the order of the draft's rows
    parents: tuple[int, ...]  # as in core.draft.Draft
    accepted_rows: tuple[int, ...]  # rows of the draft, from the root down
    num_emitted: int  # tokens of the output that the step brought
    # of the engine's step, all its requests included
    seconds: float = field(default=0.0, compare=False)
    # natural logarithm of the target's raw probability of each drafted token after its parent;
    # empty unless the request asked for log-probabilities too
    drafted_logprobs: tuple[float, ...] = ()
    # tokens that it was granted before the step was planned
    granted: int = field(default=0, compare=False)
    # about the engine's step; None: there was nothing to decide
    decision: Decision | None = field(default=None, compare=False)


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n sequences.

    Attributes:
        origins: a DraftSource or a TargetChoice for each of token_ids.
        logprobs: per token, token id -> Logprob: the chosen token and the most likely ones.
        finish_reason: "stop", "length", "abort", "error", or None while running.
        stop_reason: the stop string or stop token id that ended it, if one did.
        trace: its steps, if the request asked for them.
        error: the cause, if finish_reason is "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    trace: list[DraftTrace] | None = None
    error: str | None = None

    def extend(self, gained: "CompletionOutput") -> None:
        """Append what the sequence gained; all other fields become those of `gained`."""
        self.text += gained.text
        self.token_ids += gained.token_ids
        self.origins += gained.origins
        self.logprobs = _extended(self.logprobs, gained.logprobs)
        self.trace = _extended(self.trace, gained.trace)
        self.cumulative_logprob = gained.cumulative_logprob
        self.finish_reason, self.stop_reason = gained.finish_reason, gained.stop_reason
        self.error = gained.error


@dataclass(slots=True)
class SpeculationMetrics:
    """One request's speculation in numbers; field names and formulas are vLLM's.

    A step counts as a speculative one if it verified at least one draft.
    """

    num_spec_tokens: int  # most drafts a step, as configured
    lossless: bool = True  # False: configured to accept what is plausible
    per_step_drafted: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)

    def record(self, drafted: Mapping[str, int], accepted: Mapping[str, int]) -> None:
        """A step verified drafts: tokens by source; nothing may be accepted of a source."""
        self.per_step_drafted.append(sum(drafted.values()))
        self.per_step_accepted.append(sum(accepted.values()))
        for source, number in drafted.items():
            self.drafted_by_source[source] = self.drafted_by_source.get(source, 0) + number
            total = self.accepted_by_source.get(source, 0) + accepted.get(source, 0)
            self.accepted_by_source[source] = total

    @property
    def num_spec_steps(self) -> int:
        return len(self.per_step_drafted)

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.per_step_drafted)

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(self.per_step_accepted)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted per drafted token; 0 before the first draft."""
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a speculative step, the bonus or recovered token included."""
        return 1 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)

    @property
    def acceptance_histogram(self) -> list[int]:
        """Numbers of speculative steps that accepted 0, 1, 2, ... drafts."""
        return _histogram(self.per_step_accepted, self.num_spec_tokens)

    @property
    def acceptance_histogram_by_draft_length(self) -> dict[int, list[int]]:
        """Histograms of accepted drafts, by the number of drafts of the step."""
        pairs = list(zip(self.per_step_drafted, self.per_step_accepted, strict=True))
        return {
            length: _histogram([a for d, a in pairs if d == length], length)
            for length in sorted(set(self.per_step_drafted))
        }


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds of the monotonic clock; None: not yet."""

    arrival_s: float
    speculative_decoding: SpeculationMetrics
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(slots=True)
class RequestOutput:
    """A request so far; it grows while tokens arrive.

    Attributes:
        prompt_logprobs: per prompt token, None for the first, which nothing precedes.
        num_cached_tokens: prompt tokens that the prefix cache supplied.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0

    @property
    def error(self) -> str | None:
        """The error of its first sequence that failed."""
        return next((one.error for one in self.outputs if one.error is not None), None)

    def snapshot(self) -> "RequestOutput":
        """A copy that does not grow; it shares the parts that never change again."""
        speculation = _copied(self.metrics.speculative_decoding)
        return replace(
            self,
            outputs=[_copied(output) for output in self.outputs],
            metrics=replace(self.metrics, speculative_decoding=speculation),
            prompt_logprobs=copy(self.prompt_logprobs),
        )


def _copied(value: Value) -> Value:
    """A copy with lists and dictionaries of its own, whose items it shares."""
    own = {one.name: copy(getattr(value, one.name)) for one in fields(value)}
    return replace(value, **own)


def _extended(items: list[Item] | None, more: list[Item] | None) -> list[Item] | None:
    if items is None:
        return copy(more)
    items += more or ()
    return items


def _histogram(values: list[int], highest: int) -> list[int]:
    counts = [0] * (max([highest, *values]) + 1)
    for value in values:
        counts[value] += 1
    return counts


class SequenceDelta(Struct, frozen=True):
    """The gain of one of a request's n sequences in a step.

    Attributes:
        origins: a DraftSource or a TargetChoice for each of token_ids.
        drafted: tokens that the step verified, by source; None: there was no draft.
        logprobs: one per token, if the request asked; there may be more of the most likely tokens
            than it asked for.
        trace: if the request asked for it.
        finish_reason: a core.request.FinishReason, if the sequence ended.
        stop_reason: the stop token that ended it, if one did. The engine knows no stop strings.
        error: the cause, if it ended with FinishReason.ERROR.
    """

    index: int
    token_ids: tuple[int, ...]
    origins: tuple[str, ...]
    drafted: dict[str, int] | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    trace: DraftTrace | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None


class RequestDelta(Struct, frozen=True):
    """The gain of one request in a step; times and counts cover the whole request so far."""

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
