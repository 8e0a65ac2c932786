"""What the front end and the engine process tell each other; msgpack on the wire.

Front end to engine: one of COMMANDS. Engine to front end: one of REPORTS. Times are seconds of the
monotonic clock, which all processes of a machine share.
"""

from msgspec import Struct

from outdraft.core.plan import StepStats
from outdraft.core.sampling import SamplingParams


class Add(Struct, tag=True, frozen=True):
    """Queue a request. The prompt is checked and encoded, texts are none of the engine's business:
    params have no stop strings, and detokenize is off."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


class Abort(Struct, tag=True, frozen=True):
    """End a request early; an unknown one is ignored."""

    request_id: str


class EndSequence(Struct, tag=True, frozen=True):
    """One of a request's sequences has reached a stop string; an unknown one is ignored."""

    request_id: str
    index: int


class Stop(Struct, tag=True, frozen=True):
    """End the process; what still runs is aborted."""


Command = Add | Abort | EndSequence | Stop


class LogprobRow(Struct, array_like=True, frozen=True):
    """One position; see core.plan.TokenLogprobs."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class DraftStep(Struct, array_like=True, frozen=True):
    """One speculative or plain step of a sequence, for whoever wants to see what was drafted.

    Attributes:
        sources: of each drafted token; empty: nothing was drafted.
        drafted_ids: in the order of the draft's rows.
        parents: as in core.draft.Draft; empty for a chain.
        accepted_rows: rows of the draft, from the root down.
        seconds: of the whole engine step, all its requests included.
    """

    sources: list[str]
    drafted_ids: list[int]
    parents: list[int]
    accepted_rows: list[int]
    num_emitted: int
    seconds: float


class SequenceDelta(Struct, array_like=True, frozen=True):
    """What one sequence gained since it was last reported.

    Attributes:
        origins: a core.outputs.TokenOrigin per token.
        logprobs: a row per token, if the request asked.
        stop_reason: the stop token that ended it, if one did.
        steps: if the request asked for a trace.
    """

    index: int
    token_ids: list[int]
    origins: list[str]
    logprobs: list[LogprobRow] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    steps: list[DraftStep] | None = None


class Progress(Struct, tag=True, frozen=True):
    """What one request gained in a step.

    Attributes:
        num_spec_tokens: most drafts a step.
        lossless: the output has the target's own distribution.
        drafted: tokens by source, an entry for each sequence that had drafts, by index; it had none
            if its first new token is a plain one. What was accepted, the origins tell.
        prompt_logprobs: complete, with the first report that has any token.
    """

    request_id: str
    sequences: list[SequenceDelta]
    finished: bool
    first_scheduled_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_spec_tokens: int = 0
    lossless: bool = True
    drafted: list[dict[str, int]] = []
    prompt_logprobs: list[LogprobRow | None] | None = None


class Refused(Struct, tag=True, frozen=True):
    """A request was not accepted.

    Attributes:
        kind: "request" (it can never run; `field` says why), "capacity" (it may later) or
            "engine" (a step failed while it ran).
    """

    request_id: str
    kind: str
    message: str
    field: str = ""


class EngineInfo(Struct, tag=True, frozen=True):
    """The first report: the engine is ready.

    Attributes:
        speculation_methods: sources that requests may name, most preferred first; empty: off.
        lossless: outputs have the target's own distribution.
        memory: the memory table, as text.
        tokenizer_path: a directory.
    """

    model: str
    model_path: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    max_num_seqs: int
    max_waiting: int
    speculation_methods: list[str]
    num_speculative_tokens: int
    memory: str
    weight_bytes: int
    tokenizer_path: str = ""
    lossless: bool = True


class Steps(Struct, tag=True, frozen=True):
    """Statistics of the steps since the last report, oldest first.

    Attributes:
        num_running, num_waiting: requests, now.
        kv_usage: share of the KV blocks in use, now.
    """

    steps: list[StepStats]
    num_running: int
    num_waiting: int
    kv_usage: float


class Loading(Struct, tag=True, frozen=True):
    """Progress of the start-up.

    Attributes:
        fraction: of `stage`, from 0 to 1.
    """

    stage: str
    fraction: float


class Failed(Struct, tag=True, frozen=True):
    """The last report: the engine could not start, or cannot go on.

    Attributes:
        kind: "config" if its configuration is to blame.
    """

    kind: str
    message: str


# One frame holds what a step had to tell.
Report = Progress | Refused | EngineInfo | Steps | Loading | Failed
