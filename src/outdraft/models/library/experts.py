"""Mixtures of experts of transformers models, computed by the table of kernels.

The library gives its modules of experts one interface (its integrations/moe.py): rows, the ids of
their experts, and weights. A module whose arithmetic is known is replaced by one that calls the
kernels, with its weights packed. All others stay as they are.

Dimension key: as in kernels/products.py.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from outdraft.core.weights import RoutedWeights
from outdraft.distributed.group import ALONE, RankGroup
from outdraft.kernels.data.coded_weight import Codes, joined
from outdraft.kernels.products import Activation, Experts, ExpertWeights, Gate
from outdraft.models.checkpoints.stored import StoredParameter
from outdraft.models.library.checkpoint import CodedParameter, Packing

_logger = logging.getLogger(__name__)

# The library's classes of activations, by name.
ACTIVATIONS = {
    "SiLU": Activation.SILU,
    "SiLUActivation": Activation.SILU,
    "GELUActivation": Activation.GELU,
    "GELUTanh": Activation.GELU_TANH,
    "NewGELUActivation": Activation.GELU_TANH,
}
_USUAL_GATE = "_default_apply_gate"  # act(gate) * up
_CLAMPING = ("GptOssExperts", "OpenAIPrivacyFilterExperts")  # with an alpha and a limit
_WEIGHTS = ("gate_up_proj", "down_proj")
_DENSE = "Llama4TextExperts"  # is called with all rows for each expert, most of them zeros


class PackedExperts(nn.Module):
    """Replaces a transformers module of experts.

    Attributes:
        num_experts: those of the layer.
        packed_bytes: of the weights of all of them, on this rank.
    """

    def __init__(
        self, experts: Experts, num_experts: int, plain_bytes: int, group: RankGroup = ALONE
    ) -> None:
        """
        Args:
            plain_bytes: of the weights that `experts` was made from; it may still read them.
            group: the ranks that have parts of these experts. As `RowParallel`, each rounds what
                its part gives, and the sum is rounded once.
        """
        super().__init__()
        self.experts, self.num_experts, self._group = experts, num_experts, group
        self.packed_bytes = experts.nbytes or plain_bytes

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, D] of [T, D], int64 [T, K] and [T, K]."""
        return self._group.sum(self.experts(hidden_states, top_k_index, top_k_weights))


class PackedDenseExperts(PackedExperts):
    """Replaces the experts of Llama 4, which weights their inputs: each expert gets all rows,
    and those that do not go to it are zeros, of which it makes zeros."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[X T, D] of the same shape, expert by expert."""
        num_rows = len(hidden_states) // self.num_experts
        ids_X = torch.arange(self.num_experts, device=hidden_states.device)
        ids_R1 = ids_X.repeat_interleave(num_rows)[:, None]
        ids_R1 = ids_R1.where(hidden_states.any(dim=1, keepdim=True), self.num_experts)
        return super().forward(hidden_states, ids_R1, torch.ones_like(ids_R1).float())


class _CodesOfExperts(Sequence[Codes]):
    """The codes of one expert after the other, read when they are asked for."""

    def __init__(self, stored: StoredParameter, *, is_interleaved: bool) -> None:
        """`is_interleaved`: a row of the gate, one of up, and so on."""
        self._stored, self._is_interleaved = stored, is_interleaved

    def __len__(self) -> int:
        return len(self._stored.rows_X)

    def __getitem__(self, expert: Any) -> Any:
        if not 0 <= expert < len(self):
            raise IndexError(expert)
        coded = self._stored.coded(expert)
        if not self._is_interleaved:
            return coded
        return joined([coded.part(slice(None, None, 2)), coded.part(slice(1, None, 2))])


def replace_experts(
    module: nn.Module, packing: Packing, sums: Mapping[nn.Module, RankGroup] = MappingProxyType({})
) -> None:
    """Replace the experts inside a transformers model.

    Each layer is packed as it is reached and then given free, so that few weights are there twice.
    Experts whose arithmetic the kernels do not have stay the library's; a line of the log says so.

    Args:
        sums: for modules that have parts of their experts, the ranks that have the others.
    """
    left: dict[str, str] = {}
    for parent in present_modules(module):
        for name, child in list(parent.named_children()):
            if not _holds_experts(child):
                continue
            gate = _gate_of(child)
            if isinstance(gate, str):
                left[type(child).__name__] = gate
            else:
                setattr(parent, name, _packed(child, gate, packing, sums.get(child, ALONE)))
    for name, why in left.items():
        _logger.warning("%s stays the transformers library's own code: %s", name, why)


def routed_weights(module: nn.Module, per_row: int | None) -> RoutedWeights | None:
    """The weights of the replaced experts inside; None: there are none, or it is not known how many
    of them a row meets."""
    layers = [part for part in module.modules() if isinstance(part, PackedExperts)]
    if not layers or per_row is None:
        return None
    num_experts = max(layer.num_experts for layer in layers)
    return RoutedWeights(sum(layer.packed_bytes for layer in layers), num_experts, per_row)


def present_modules(module: nn.Module) -> Iterator[nn.Module]:
    """All modules inside, in order; those that are replaced meanwhile are left out, and free."""
    for name in [name for name, _ in module.named_modules()]:
        try:
            found = module.get_submodule(name)
        except AttributeError:
            continue
        yield found
        del found


def _holds_experts(module: nn.Module) -> bool:
    weights = module.parameters(recurse=False)
    return "Expert" in type(module).__name__ and any(weight.dim() == 3 for weight in weights)


def _gate_of(module: Any) -> Gate | str:
    """The function of the products of gate and up; or the reason why the kernels do not have it."""
    name = type(module).__name__
    if name != _DENSE:
        if not hasattr(module, "is_transposed"):
            return "it does not have the library's interface of experts"
        if not module.has_gate:
            return "its experts have no gate"
        if module.has_post_expert_norm:
            return "it has a norm behind its experts"
        if name in _CLAMPING:
            return Gate(Activation.CLAMPED, float(module.alpha), float(module.limit))
        if type(module)._apply_gate.__name__ != _USUAL_GATE:
            return "its gate is not one that the kernels have"
    activation = type(module.act_fn).__name__
    if activation not in ACTIVATIONS:
        return f"the kernels have no {activation}"
    return Gate(ACTIVATIONS[activation])


def keeps_codes(module: Any, name: str, *, is_transposed: bool) -> bool:
    """Is true if this parameter of a module of experts may be codes.

    Args:
        is_transposed: it has inputs before outputs.
    """
    return name in _WEIGHTS and is_known(module) and is_transposed == has_inputs_first(module)


def is_known(module: nn.Module) -> bool:
    """Is true for a module of experts whose arithmetic the kernels have."""
    return _holds_experts(module) and not isinstance(_gate_of(module), str)


def has_inputs_first(module: Any) -> bool:
    """Is true if weights of these experts have inputs before outputs."""
    return type(module).__name__ == _DENSE or module.is_transposed


def is_interleaved(module: Any) -> bool:
    """Is true if a row of the gate is followed by one of up, and so on."""
    return type(module).__name__ != _DENSE and not module.is_concatenated


def _packed(module: Any, gate: Gate, packing: Packing, group: RankGroup) -> PackedExperts:
    is_dense = type(module).__name__ == _DENSE
    gate_up_XED, down_XDI = module.gate_up_proj.detach(), module.down_proj.detach()
    if has_inputs_first(module):
        gate_up_XED, down_XDI = gate_up_XED.transpose(1, 2), down_XDI.transpose(1, 2)
    biases: list[Tensor | None] = [None, None]
    if not is_dense and module.has_bias:
        biases = [module.gate_up_proj_bias.detach(), module.down_proj_bias.detach()]
    gate_up_X: Sequence[Tensor | Sequence[Tensor] | Codes] = gate_up_XED.unbind()
    if is_interleaved(module):
        gate_up_X = [(weight_ED[::2], weight_ED[1::2]) for weight_ED in gate_up_XED]
        if biases[0] is not None:
            biases[0] = torch.cat((biases[0][:, ::2], biases[0][:, 1::2]), dim=1)
    down_X: Sequence[Tensor | Codes] = down_XDI.unbind()
    if isinstance(weight := module.gate_up_proj, CodedParameter):
        gate_up_X = _CodesOfExperts(weight.stored, is_interleaved=is_interleaved(module))
    if isinstance(weight := module.down_proj, CodedParameter):
        down_X = _CodesOfExperts(weight.stored, is_interleaved=False)
    weights = ExpertWeights(gate_up_X, down_X, *biases, dtype=down_XDI.dtype)
    experts = packing.kernels.pack_experts(weights, gate, packing.quantization)
    kind = PackedDenseExperts if is_dense else PackedExperts
    return kind(experts, len(down_XDI), gate_up_XED.nbytes + down_XDI.nbytes, group)
