"""What a proposer on the device promises the runner."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from outdraft.core.plan import ModelDrafting
from outdraft.drafting.device.model_drafts import DraftModelAsk, ModelDrafts
from outdraft.drafting.device.target_states import TargetStates
from outdraft.sampling.batch import SamplingBatch


class DeviceProposer(Protocol):
    """Drafts with a network, from the texts on the device, without waiting for anything.

    Attributes:
        drafting: how it drafts, as far as the scheduler and the policy must know.
        reads_states: whether it needs the target's states of every step; else `keep` is not called.
        taps: the layers whose residual streams it reads besides the last hidden state; may be ().
        max_drafts: most drafts of one request in one step.
        max_passes: most passes of the network in one step, however much it drafts.
    """

    drafting: ModelDrafting
    reads_states: bool
    max_drafts: int
    max_passes: int

    @property
    def taps(self) -> tuple[int, ...]: ...

    def propose(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, sampling: SamplingBatch
    ) -> ModelDrafts:
        """A chain or tree of `ask.num_drafts` tokens each.

        Args:
            token_ids_SL: int64, the texts; [S state rows, L tokens].
            sampling: the parameters of the same requests in the same order.
        """
        ...

    def keep(self, states: TargetStates) -> None:
        """The target has computed these; called at the end of every step."""
        ...
