"""What the runner and the scheduler tell each other of a step in which outputs keep to grammars.

The runner tells what the network drafted, which the scheduler needs for the masks of these rows.
Both cross between processes: they are numbers and arrays only.

Dimension key: B requests that sample, N drafts of one, R rows whose logits are needed, W int32
words of a mask of one bit per token, E ends.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """What the plan does not say of the drafts that are verified.

    Attributes:
        num_drafts: rows of each request that samples; a live rule may have left out some.
        drafts_2BN: int64, ids and parents; a draft that a live rule ended is padded with the id -1.
            None: no grammar needs them, as the network drafted for no request with one.
    """

    num_drafts: tuple[int, ...]
    drafts_2BN: np.ndarray | None


@dataclass(frozen=True, slots=True, eq=False)
class AllowedTokens:
    """What the grammars of a step allow.

    Attributes:
        masks_RW: int32; bit v % 32 of word v // 32 stands for token v. All ones in the rows of
            requests without a grammar.
        ends_2E: int64; places (request, draft) of drafts behind which nothing may be emitted, as
            there is no mask for that.
    """

    masks_RW: np.ndarray
    ends_2E: np.ndarray
