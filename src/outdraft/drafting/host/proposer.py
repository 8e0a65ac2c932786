"""What a proposer on the host promises the engine."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from outdraft.core.draft import Draft, DraftAsk, DraftSource


class HostProposer(Protocol):
    """Guesses tokens from token ids alone, on the host.

    A proposer can be slow, never wrong: whatever it returns, the verified output is the one
    that plain decoding would give. It knows no model, no device and no other proposer.

    The asks for one request come with growing token ids: nothing that was asked once shrinks or
    changes, not even after a preemption, and a request that did not ask for some steps has simply
    grown by more tokens. That is what makes an incremental index worth its while; yet a proposer
    copes with any tokens it is given (it starts again when they are not a continuation).
    """

    source: DraftSource

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask, in order, of at most `ask.max_tokens` tokens.

        Draft() means "no idea", and costs nothing. Token ids are read during the call only.
        """
        ...

    def finish(self, request_id: str, token_ids: np.ndarray | None) -> None:
        """The request ended: drop its state.

        From `token_ids`, int32 [num_tokens], the proposer may learn for later requests; None
        (aborted, or not to be shared) teaches nothing. Unknown ids are fine.
        """
        ...
