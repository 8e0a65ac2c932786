"""What a client of the engine gives to the reader of a request."""

from dataclasses import dataclass, replace
from typing import TypeVar

from outdraft.core.outputs import CompletionOutput, RequestOutput

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Update:
    """A request grew.

    Attributes:
        output: the whole of it so far: the same object each time, not to be kept or changed.
        deltas: what each of the sequences that grew gained. `text` may lag behind `token_ids`: it
            is held back while a character is incomplete or a stop string may begin in it. The last
            delta of a sequence has its finish_reason.
    """

    output: RequestOutput
    deltas: list[CompletionOutput]


class Unread:
    """Between an output that grows and its reader, however seldom that one comes for it."""

    def __init__(self, output: RequestOutput) -> None:
        self._output = output
        self._seen = [(0, 0, 0, False)] * len(output.outputs)

    def take(self) -> Update:
        """All that came since it was asked last."""
        deltas: list[CompletionOutput] = []
        for place, one in enumerate(self._output.outputs):
            tokens, characters, steps, has_end = self._seen[place]
            if tokens == len(one.token_ids) and has_end == (one.finish_reason is not None):
                continue
            delta = replace(
                one,
                text=one.text[characters:],
                token_ids=one.token_ids[tokens:],
                origins=one.origins[tokens:],
                logprobs=_behind(tokens, one.logprobs),
                trace=_behind(steps, one.trace),
            )
            deltas.append(delta)
            steps = len(one.trace or ())
            is_over = one.finish_reason is not None
            self._seen[place] = len(one.token_ids), len(one.text), steps, is_over
        return Update(self._output, deltas)


def _behind(count: int, items: list[Item] | None) -> list[Item] | None:
    return None if items is None else items[count:]
