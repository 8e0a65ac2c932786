"""Messages between the front end and the engine process; msgpack on the wire.

The front end sends one `Command` a frame, the engine a list of `Report`. Times are seconds of the
monotonic clock, which all processes of a machine share.
"""

from msgspec import Struct

from outdraft.core.outputs import RequestDelta
from outdraft.core.plan import StepStats
from outdraft.core.sampling import SamplingParams


class Add(Struct, tag=True, frozen=True):
    """Queue a request. The prompt is checked and encoded, and so is the prediction in `params`;
    stop strings in them are found by the front end."""

    request_id: str
    token_ids: bytes  # of the prompt: int32 [num_tokens]
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
    num_tokens: int  # of its output, up to the one that completes the stop string


class Profile(Struct, tag=True, frozen=True):
    """Begin a trace of all steps; without a path: end it, and write it to the path of its begin."""

    path: str | None


Command = Add | Abort | EndSequence | Profile


class Progress(Struct, tag=True, frozen=True):
    """The tokens of a step."""

    deltas: list[RequestDelta]


class Accepted(Struct, tag=True, frozen=True):
    """A request waits to be computed, or is computed already."""

    request_id: str


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
    """The first report: the engine is ready."""

    model_path: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    # sources that requests may name, most preferred first; empty: off
    speculation_methods: list[str]
    num_speculative_tokens: int
    memory: str  # the memory table, as text
    tokenizer_path: str = ""  # a directory
    lossless: bool = True  # outputs have the target's own distribution
    tensor_parallel_size: int = 1  # ranks
    draft_tensor_parallel_size: int = 1  # ranks that share a drafter


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
    """The next stage of the start-up has begun."""

    stage: str


class Profiled(Struct, tag=True, frozen=True):
    """The answer to one Profile."""

    error: str | None  # why it was not done; None: it was


class EngineFailed(Struct, tag=True, frozen=True):
    """The last report: the engine could not start, or cannot go on."""

    kind: str  # "config" if its configuration is to blame, "ranks" if one of its ranks is
    message: str


# One frame holds all reports of a step.
Report = Progress | Accepted | Refused | EngineInfo | Steps | Loading | EngineFailed | Profiled
