"""A forward pass of a few rows on the CPU, or a whole greedy draft, in one compiled call.

It does for a CPU what CUDA graphs do for a GPU: the same work without the calls. It is for float32
models whose weights are packed as bfloat16. Its slow twins are the layers of llama.py and eagle.py,
which call one operator after the other.

Dimension key: T rows, R rows that need logits, B requests of one row, D hidden, L layers, F fields
of a layer or of a pass, K tapped layers or passes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.attention.cpu import NO_WINDOW, address_of
from outdraft.core.weight_format import WeightFormat
from outdraft.kernels.native.linear import NativeProduct
from outdraft.models import forward_kernels
from outdraft.models.config import ModelConfig
from outdraft.models.entry_kernels import Entry
from outdraft.models.layers.linear import Linear
from outdraft.models.layers.linear_team import Team, shared_team
from outdraft.models.layers.norm import RMSNorm
from outdraft.models.layers.rotary import Rotary

MAX_ROWS = 64  # with more rows the layers' own calls hardly count, and threads can share their work
_LONG_TEXT = 4096  # tokens; behind longer contexts a second thread saves more than the calls cost
_NO_STATES = np.empty((0, 0), dtype=np.float32)


class CompiledForward:
    """The pass of a network over at most MAX_ROWS rows, with the weights of the network's layers.

    It has their addresses and does not keep them alive. One thread computes its attention, see
    `suits`.
    """

    def __init__(
        self,
        config: ModelConfig,
        entry: Entry,
        embedding_VD: Tensor,
        rotary: Rotary,
        layers: Sequence["LayerParts"],
        final_norm: RMSNorm | None,
        team: Team | None,
    ) -> None:
        self._config, self._entry = config, entry
        self._team = team
        self._rotary = rotary
        self._embedding_VD, self._final_norm = embedding_VD, final_norm
        self._layers_LF = np.zeros((len(layers), forward_kernels.NUM_FIELDS), dtype=np.int64)
        for fields, layer, window in zip(self._layers_LF, layers, config.windows, strict=True):
            for place, norm in layer.norms:
                fields[place] = norm.weight.data_ptr()
            for place, linear in layer.linears:
                fields[place : place + 2] = packed_addresses(linear)
            fields[forward_kernels.WINDOW] = NO_WINDOW if window is None else window
        self._bound: dict[tuple[int, ...], _Bound] = {}  # by the caches' addresses
        self._shape = self._unbound_shape()

    def __call__(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int] = (),
        states_TD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `CausalLM.forward_tapped`, all float32; with states the first part is that of
        `EagleNetwork.forward`."""
        bound, rows = self._bind(caches), _rows(token_ids_T, metadata)
        hidden_TD = np.empty((len(token_ids_T), self._config.hidden_size), dtype=np.float32)
        tapped_KTD = np.empty((len(taps), *hidden_TD.shape), dtype=np.float32)
        taps_K = np.array(taps, dtype=np.int64)
        states = _NO_STATES if states_TD is None else states_TD.contiguous().numpy()
        forward_kernels.forward(
            bound.shape, rows, bound.layers_LF, states, taps_K, tapped_KTD, hidden_TD
        )
        return torch.from_numpy(hidden_TD), torch.from_numpy(tapped_KTD)

    def suits(self, batches: Sequence[AttentionMetadata]) -> bool:
        """Whether these passes are faster here than by layers, whose attention shares its work
        among threads."""
        num_rows = max((len(metadata.slots_T) for metadata in batches), default=0)
        longest = max((metadata.max_seq_len for metadata in batches), default=0)
        return num_rows <= MAX_ROWS and (self._team is None or longest <= _LONG_TEXT)

    def best_tokens(self, states_RD: Tensor, head: forward_kernels.Head) -> tuple[Tensor, Tensor]:
        """int64 [R]: the best token behind each state; bool [R]: its logit is finite."""
        ids_R = np.empty(len(states_RD), dtype=np.int64)
        is_finite_R = np.empty(len(states_RD), dtype=np.bool_)
        states = states_RD.contiguous().numpy()
        forward_kernels.best_tokens(self._shape, head, states, ids_R, is_finite_R)
        return torch.from_numpy(ids_R), torch.from_numpy(is_finite_R)

    def _bind(self, caches: Sequence[LayerCache]) -> "_Bound":
        """Addresses for one engine's caches; engines that share the weights share no state."""
        block_size = caches[0].k_PSGC.shape[1]
        key = (block_size, *(cache.k_PSGC.data_ptr() for cache in caches))
        bound = self._bound.get(key)
        if bound is not None:
            return bound
        layers_LF = self._layers_LF.copy()
        for fields, cache in zip(layers_LF, caches, strict=True):
            fields[forward_kernels.K_CACHE] = address_of(cache.k_PSGC, torch.float32)
            fields[forward_kernels.V_CACHE] = address_of(cache.v_PSGC, torch.float32)
        shape = self._shape._replace(block_size=block_size)
        bound = self._bound[key] = _Bound(shape, layers_LF)
        return bound

    def _unbound_shape(self) -> forward_kernels.Shape:
        """All but the caches' part."""
        config, cos_sin_MC = self._config, self._rotary.cos_sin_MC
        return forward_kernels.Shape(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            eps=config.rms_norm_eps,
            scale=config.head_size**-0.5,
            embedding=address_of(self._embedding_VD, torch.float32),
            cos_sin=address_of(cos_sin_MC, torch.float32),
            num_positions=len(cos_sin_MC),
            final_norm=norm_address(self._final_norm),
            block_size=0,
            team=0 if self._team is None else self._team.address,
            entry=self._entry,
        )


@dataclass(frozen=True, slots=True)
class _Bound:
    """What the kernels need besides the rows."""

    shape: forward_kernels.Shape
    layers_LF: np.ndarray


class LayerParts:
    """Norms and linears of one layer by their places in forward_kernels."""

    def __init__(
        self, norms: Sequence[tuple[int, RMSNorm]], linears: Sequence[tuple[int, Linear]]
    ) -> None:
        self.norms = norms
        self.linears = linears


def norm_address(norm: RMSNorm | None) -> int:
    """The address of its weight; 0 without a norm."""
    return 0 if norm is None else address_of(norm.weight, torch.float32)


def packed_head(
    linear: Linear, norm: RMSNorm | None = None, draft_ids_N: Tensor | None = None
) -> forward_kernels.Head | None:
    """For the kernels; None if it is not packed as they read it."""
    if linear.format is not WeightFormat.BFLOAT16:
        return None
    return forward_kernels.Head(
        weights=packed_addresses(linear)[0],
        num_outputs=linear.num_outputs,
        norm=norm_address(norm),
        draft_ids=0 if draft_ids_N is None else address_of(draft_ids_N, torch.int64),
    )


def packed_addresses(linear: Linear) -> tuple[int, int]:
    """Of tiles and bias; they outlive late helpers of this pass."""
    product = linear.product
    assert isinstance(product, NativeProduct)
    if (team := shared_team(torch.get_num_threads())) is not None:
        team.lend(product, torch.empty(0))
    return product.addresses()


def _rows(token_ids_T: Tensor, metadata: AttentionMetadata) -> forward_kernels.Rows:
    token_ids, num_rows = address_of(token_ids_T, torch.int64), len(token_ids_T)
    assert num_rows == len(metadata.slots_T)
    return forward_kernels.Rows(token_ids, *_fields(metadata)[1:])


def _fields(metadata: AttentionMetadata) -> tuple[int, ...]:
    """The fields of Rows, without the token ids."""
    table_BP = metadata.block_table_BP
    return (
        0,
        address_of(metadata.positions_T, torch.int64),
        address_of(metadata.slots_T, torch.int64),
        address_of(metadata.query_start_B1, torch.int32),
        address_of(metadata.context_lens_B, torch.int32),
        address_of(metadata.num_causal_B, torch.int32),
        address_of(metadata.ancestors_T, torch.int64),
        address_of(table_BP, torch.int32),
        len(metadata.slots_T),
        len(metadata.context_lens_B),
        table_BP.shape[1],
    )
