"""The contract of a proposer on the host."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from outdraft.core.draft import Draft, DraftAsk, DraftSource


class HostProposer(Protocol):
    """Drafts from token ids alone, on the host.

    A proposer can be slow, never wrong: whatever it returns, the verified output is the one
    that plain decoding would give. It uses no model, no device and no other proposer.

    The token ids of a request only grow from ask to ask: they never shrink or change, not even
    after a preemption. After steps without an ask they have grown by more tokens. So an incremental
    index pays. A proposer still works with any tokens that it is given: it starts again when they
    do not continue the earlier ones.
    """

    source: DraftSource

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask, in order, of at most `ask.max_tokens` tokens.

        Draft() means "no idea", and costs nothing. Token ids are read during the call only.
        """
        ...

    def finish(self, request_id: str, token_ids: np.ndarray | None) -> None:
        """The request ended: drop its state.

        The proposer may learn from `token_ids`, int32 [num_tokens], for later requests. None: there
        is nothing to learn (aborted, or not to be shared). Unknown request ids are fine.
        """
        ...
