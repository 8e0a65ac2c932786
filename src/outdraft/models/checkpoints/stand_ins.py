"""Parameters of a network whose weights stay codes, until its products are packed.

Dimension key: D inputs, E outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from outdraft.core.weight_format import WeightFormat
from outdraft.kernels.data.coded_weight import Codes
from outdraft.kernels.ops import Kernels
from outdraft.models.checkpoints.deferred import DeferredTensor, StoredParameter
from outdraft.models.checkpoints.placing import common_tile
from outdraft.models.checkpoints.stored import StoredWeight
from outdraft.models.decoder.linear import Linear


class StandIns:
    """What is in the place of parameters that are not read yet.

    A stand-in has the shape of its parameter and random numbers, so that passes through the network
    try all of it, and takes next to no memory. All are to be packed, then `read_rest` reads others.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[nn.Parameter, StoredParameter]] = {}
        self._given_up: list[StoredWeight] = []

    def put(
        self, module: nn.Module, can_keep: Callable[[nn.Module, str, StoredParameter], bool]
    ) -> None:
        """Into all places of deferred tensors; those that cannot stay codes are read.

        Args:
            can_keep: whether something packs the codes of this parameter of a module.
        """
        of_tied = dict[int, nn.Parameter]()
        for part in module.modules():
            for name, weight in list(part.named_parameters(recurse=False)):
                if not isinstance(weight, DeferredTensor):
                    continue
                made = of_tied.get(id(weight))
                if made is None:
                    stored = weight.stored
                    keeps = stored.has_tiles and can_keep(part, name, stored)
                    numbers = _random_like(stored) if keeps else stored.numbers()
                    made = of_tied[id(weight)] = nn.Parameter(numbers, requires_grad=False)
                    if keeps:
                        self._found[id(made)] = made, stored
                    else:
                        self._given_up += _weights_of(stored)
                part.register_parameter(name, made)

    @property
    def kept(self) -> list[StoredWeight]:
        """All weights that stay codes."""
        return [weight for _, stored in self._found.values() for weight in _weights_of(stored)]

    @property
    def given_up(self) -> list[StoredWeight]:
        """Those that were deferred, and are numbers now."""
        return self._given_up

    def stored(self, weight: Tensor) -> StoredParameter | None:
        """What a parameter stands for; None: for itself."""
        found = self._found.get(id(weight))
        return None if found is None else found[1]

    def can_join(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are one product: none of them is codes, or all are and fit one format."""
        kept = [stored for weight in weights if (stored := self.stored(weight)) is not None]
        if not kept:
            return True
        parts = [(weight.tile, weight.shape[0]) for one in kept for weight in one.rows_X[0]]
        return len(kept) == len(weights) and common_tile(parts) is not None

    def coded(self, weights: Sequence[Tensor]) -> Codes | None:
        """The codes of weights one below the other; None: they are numbers."""
        kept = [stored for weight in weights if (stored := self.stored(weight)) is not None]
        if not kept:
            return None
        assert self.can_join(weights), "weights of several kinds"
        rows = [weight for stored in kept for weight in stored.rows_X[0]]
        return StoredParameter([rows], False, False, kept[0].dtype).coded()

    def read_rest(self, module: nn.Module) -> None:
        """Give the numbers to all that was not packed."""
        for part in module.modules():
            for name, weight in list(part.named_parameters(recurse=False)):
                if (stored := self.stored(weight)) is not None:
                    part.register_parameter(name, nn.Parameter(stored.numbers(), False))
                    del self._found[id(weight)]


@dataclass(frozen=True, slots=True)
class Packing:
    """How the products of a network are packed; those that are codes stay so.

    Attributes:
        stand_ins: has those that are codes.
        release: gives memory back that was mapped to read them.
    """

    kernels: Kernels
    quantization: WeightFormat | None = None
    stand_ins: StandIns = field(default_factory=StandIns)
    release: Callable[[], None] = lambda: None

    def pack(
        self, linear: Linear, weights: Sequence[Tensor], parts_ED: Sequence[Tensor] = ()
    ) -> None:
        """Make a product of these weights of the network, one below the other; as Linear.pack."""
        if (coded := self.stand_ins.coded(weights)) is not None:
            linear.pack_codes(self.kernels, coded, weights[0].dtype)
            self.release()
        else:
            linear.pack(self.kernels, self.quantization, parts_ED)


def _weights_of(stored: StoredParameter) -> list[StoredWeight]:
    return [weight for rows in stored.rows_X for weight in rows]


def _random_like(stored: StoredParameter) -> Tensor:
    """Numbers of that shape; each row is the one before it, moved by one place."""
    generator = torch.Generator().manual_seed(0)
    shape = stored.shape
    numbers = torch.randn(sum(shape), generator=generator) * shape[-1] ** -0.5
    return numbers.to(stored.dtype).as_strided(shape, (1,) * len(shape))
