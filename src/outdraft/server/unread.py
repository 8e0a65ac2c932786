"""What a request's reader has not seen yet."""

from outdraft.core.outputs import CompletionOutput, RequestOutput
from outdraft.server.client import TextDelta, Update


class Unread:
    """Between an output that grows and its reader, however seldom that one comes for it."""

    def __init__(self, output: RequestOutput) -> None:
        self._output = output
        self._sequences = [_Sequence(completion) for completion in output.outputs]

    def take(self) -> Update:
        """All that came since it was asked last."""
        deltas = [sequence.take() for sequence in self._sequences]
        return Update(self._output, [delta for delta in deltas if delta is not None])


class _Sequence:
    """One of the n sequences, and how much of it the reader has."""

    def __init__(self, completion: CompletionOutput) -> None:
        self._completion = completion
        self._num_tokens = 0
        self._num_characters = 0
        self._num_steps = 0
        self._has_end = False

    def take(self) -> TextDelta | None:
        one = self._completion
        first, has_ended = self._num_tokens, one.finish_reason is not None
        if first == len(one.token_ids) and has_ended == self._has_end:
            return None
        delta = TextDelta(
            one.index,
            one.text[self._num_characters :],
            one.token_ids[first:],
            one.origins[first:],
            None if one.logprobs is None else one.logprobs[first:],
            one.finish_reason,
            one.stop_reason,
            None if one.trace is None else one.trace[self._num_steps :],
        )
        self._num_tokens = len(one.token_ids)
        self._num_characters = len(one.text)
        self._num_steps = len(one.trace or ())
        self._has_end = has_ended
        return delta
