"""A request as a trace of requests keeps it: one line of JSON each, ids and numbers, never text.

A server writes such lines, `outdraft replay` reads them. `read_requests` checks all that a replay
relies on, so what comes from it can be taken as it is.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field

from outdraft.core.errors import ConfigError

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]


class RecordedStep(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One step of a sequence that brought tokens.

    Attributes:
        tokens: of the output that it brought.
        drafted, accepted: tokens by source; empty: nothing was drafted. Drafts that were accepted
            after the end of the text do not count.
    """

    tokens: Positive
    drafted: dict[str, Positive] = field(default_factory=dict)
    accepted: dict[str, Count] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for source, count in self.accepted.items():
            if count > self.drafted.get(source, 0):
                raise ValueError(f"accepted tokens of {source}: {count} of what was drafted")
        if sum(self.accepted.values()) > self.tokens:
            raise ValueError(f"more tokens were accepted than the {self.tokens} that came")


class RecordedOutput(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One of a request's n sequences.

    Attributes:
        finish_reason: a core.request.FinishReason. "abort": its reader left, so that the text ends
            where it happened to be, maybe before the first token.
    """

    token_ids: list[TokenId]
    finish_reason: Literal["stop", "length", "abort", "error"]
    steps: list[RecordedStep]

    def __post_init__(self) -> None:
        brought = sum(step.tokens for step in self.steps)
        if brought != len(self.token_ids):
            raise ValueError(f"steps bring {brought} tokens, token_ids has {len(self.token_ids)}")


class RecordedRequest(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One finished request.

    Attributes:
        format: of the line.
        arrival_s: seconds since the recording began.
        elapsed_s: from the arrival to the end.
        max_tokens: most tokens that each output could have had.
        temperature: of the sampling; 0: greedy.
        rule: how its drafts were verified; acceptance is learned for each rule apart.
        num_cached_tokens: of the prompt, that the prefix cache supplied.
        may_draft: False: its client wanted plain decoding.
        method: the one source that its client wanted.
        num_speculative_tokens: most drafts that its client wanted.
        prediction_token_ids: the output that its client expected.
        tree: rows by level of the drafts of the engine's network; empty: chains.
    """

    format: Literal[1]
    arrival_s: NotNegative
    elapsed_s: NotNegative
    prompt_token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    max_tokens: Positive
    temperature: NotNegative
    rule: str
    outputs: Annotated[list[RecordedOutput], Meta(min_length=1)]
    num_cached_tokens: Count = 0
    may_draft: bool = True
    method: str | None = None
    num_speculative_tokens: Count | None = None
    prediction_token_ids: list[TokenId] = field(default_factory=list)
    tree: list[Positive] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.num_cached_tokens >= len(self.prompt_token_ids):
            raise ValueError(
                f"num_cached_tokens must be less than the prompt's {len(self.prompt_token_ids)}, "
                f"got {self.num_cached_tokens}"
            )
        longest = max((len(output.token_ids) for output in self.outputs), default=0)
        if longest > self.max_tokens:
            raise ValueError(f"an output has {longest} tokens, but max_tokens is {self.max_tokens}")


def read_requests(path: Path) -> tuple[list[RecordedRequest], bool]:
    """The requests of a trace by arrival, and whether its last line is whole.

    A last line without an end is what an interrupted writer leaves; it is left out.

    Raises:
        ConfigError: the file cannot be read, has no request, or a line is wrong; the line and the
            field are named.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror}") from error
    *lines, rest = content.split(b"\n")
    requests = list(_decoded(path, lines))
    if not requests:
        raise ConfigError(f"the trace {path} holds no request")
    return sorted(requests, key=lambda request: request.arrival_s), not rest


def _decoded(path: Path, lines: list[bytes]) -> Iterator[RecordedRequest]:
    decoder = msgspec.json.Decoder(RecordedRequest)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
