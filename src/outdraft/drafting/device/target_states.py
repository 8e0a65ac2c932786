"""What the target's pass leaves for drafters that read its hidden states.

Dimension key: T rows of the pass, D hidden of the target, K tapped layers, W works.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct
from torch import Tensor

from outdraft.drafting.device.model_drafts import DraftModelAsk


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """Tokens of one text that a drafter reads with the states of this step, as they pass by.

    Attributes:
        text: what it reads up to, as if it would draft behind it.
        first_row: the row of the pass that computed the first of these tokens; the others follow.
    """

    text: DraftModelAsk
    first_row: int


class TargetStates(Struct, frozen=True):
    """The states of a step's rows, once it is known which of them became part of a text.

    All tensors are on the device, and the host has not waited for them.

    Attributes:
        hidden_TD: behind the final norm; zeros of rows that the drafter does not read.
        tapped_TKD: residual streams behind the layers that the drafter asked for.
        places_T: int64; where a StateWindow keeps the state of each row, -1 if it is that of a
            refused draft, or of a token that is older than the window.
        last_rows_W: int64; the row of each text's last computed token. It has all requests of the
            step, those included that have more of their prompt to read.
        last_places_W: int64; the places of these rows.
        token_ids_SL: int64; the texts, with the tokens that the step emitted.
        reads: what the drafter reads now.
    """

    hidden_TD: Tensor
    tapped_TKD: Tensor
    places_T: Tensor
    last_rows_W: Tensor
    last_places_W: Tensor
    token_ids_SL: Tensor
    reads: Sequence[ChunkRead] = ()
