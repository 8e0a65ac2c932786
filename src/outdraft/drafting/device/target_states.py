"""What the target's pass leaves for drafters that read its hidden states.

Dimension key: T rows of the pass, D hidden of the target, K tapped layers, B requests.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TargetStates:
    """The states of a step's rows, once it is known which of them became part of a text.

    All tensors are on the device, and the host has not waited for them.

    Attributes:
        hidden_TD: behind the final norm.
        tapped_KTD: residual streams behind the layers that the drafter asked for.
        slots_T: int64; where the token of each row stands in the caches from now on, -1 if it is
            a draft that was refused. Prompt chunks are among the rows.
        last_rows_B: int64; the row of each text's last computed token. It has all requests of the
            step, those included that have more of their prompt to read.
        state_rows_B: int64; the rows of the same requests in the device's state.
    """

    hidden_TD: Tensor
    tapped_KTD: Tensor
    slots_T: Tensor
    last_rows_B: Tensor
    state_rows_B: Tensor
