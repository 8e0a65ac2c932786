"""A forward pass of a few rows on the CPU, or a whole greedy draft, in one compiled call.

What CUDA graphs are for a GPU: the same work without the calls. For float32 models whose weights
are packed as bfloat16; the layers of models/llama.py are its slow twin.

Dimension key: T rows, D hidden, L layers, F fields of a layer, K tapped layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.attention.cpu import NO_WINDOW, address_of
from outdraft.models import forward_kernels as kernels
from outdraft.models.config import ModelConfig
from outdraft.models.layers.linear import Linear
from outdraft.models.layers.linear_team import Team
from outdraft.models.layers.norm import RMSNorm
from outdraft.models.layers.rotary import Rotary

MAX_ROWS = 64  # with more, the layers' own calls cost nothing and can share the work


class CompiledForward:
    """`CausalLM.forward` of at most MAX_ROWS rows, on the weights where the layers keep them."""

    def __init__(
        self,
        config: ModelConfig,
        embedding_VD: Tensor,
        rotary: Rotary,
        layers: Sequence["LayerParts"],
        final_norm: RMSNorm,
        team: Team | None,
    ) -> None:
        self._config = config
        self._team = team
        self._rotary = rotary
        self._embedding_VD, self._final_norm = embedding_VD, final_norm.weight
        self._layers_LF = np.zeros((len(layers), kernels.NUM_FIELDS), dtype=np.int64)
        for fields, layer, window in zip(self._layers_LF, layers, config.windows, strict=True):
            for place, norm in layer.norms:
                fields[place] = norm.weight.data_ptr()
            for place, linear in layer.linears:
                weights, bias = linear.packed_addresses()
                fields[place], fields[place + 1] = weights, bias
            fields[kernels.WINDOW] = NO_WINDOW if window is None else window
        self._parts = layers  # keeps the memory alive
        self._bound: dict[tuple[int, ...], _Bound] = {}  # by the caches' addresses

    def __call__(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """As `CausalLM.forward_tapped`, all float32."""
        bound, rows = self._bind(caches), _rows(token_ids_T, metadata)
        hidden_TD = np.empty((len(token_ids_T), self._config.hidden_size), dtype=np.float32)
        tapped_KTD = np.empty((len(taps), *hidden_TD.shape), dtype=np.float32)
        taps_K = np.array(taps, dtype=np.int64)
        kernels.forward(bound.shape, rows, bound.layers_LF, taps_K, tapped_KTD, hidden_TD)
        return torch.from_numpy(hidden_TD), torch.from_numpy(tapped_KTD)

    def best_tokens(self, hidden_RD: Tensor, head: Linear) -> Tensor:
        """int64 [R]: the best token behind each hidden state."""
        ids_R = np.empty(len(hidden_RD), dtype=np.int64)
        kernels.best_tokens(
            0 if self._team is None else self._team.address,
            head.packed_addresses()[0],
            head.num_outputs,
            hidden_RD.contiguous().numpy(),
            ids_R,
        )
        return torch.from_numpy(ids_R)

    def greedy_chain(
        self,
        first_ids_B: Tensor,
        head: Linear,
        caches: Sequence[LayerCache],
        batches: Sequence[AttentionMetadata],
    ) -> Tensor:
        """int64 [K, B]: first_ids, then the best token behind each, len(batches) times."""
        bound = self._bind(caches)
        rows = [_rows(first_ids_B, metadata) for metadata in batches]
        ids_KB = np.empty((1 + len(batches), len(first_ids_B)), dtype=np.int64)
        ids_KB[0] = first_ids_B.numpy()
        kernels.extend_chain(
            bound.shape,
            np.array(rows, dtype=np.int64).reshape(len(rows), len(kernels.Rows._fields)),
            bound.layers_LF,
            head.packed_addresses()[0],
            head.num_outputs,
            ids_KB,
        )
        return torch.from_numpy(ids_KB)

    def _bind(self, caches: Sequence[LayerCache]) -> "_Bound":
        """Addresses for one engine's caches; engines that share the weights share no state."""
        block_size = caches[0].k_PSGC.shape[1]
        key = (block_size, *(cache.k_PSGC.data_ptr() for cache in caches))
        bound = self._bound.get(key)
        if bound is not None:
            return bound
        config, cos_sin_MC = self._config, self._rotary.cos_sin_MC
        layers_LF = self._layers_LF.copy()
        for fields, cache in zip(layers_LF, caches, strict=True):
            fields[kernels.K_CACHE] = address_of(cache.k_PSGC, torch.float32)
            fields[kernels.V_CACHE] = address_of(cache.v_PSGC, torch.float32)
        shape = kernels.Shape(
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
            final_norm=address_of(self._final_norm, torch.float32),
            block_size=block_size,
            team=0 if self._team is None else self._team.address,
        )
        bound = self._bound[key] = _Bound(shape, layers_LF)
        return bound


@dataclass(frozen=True, slots=True)
class _Bound:
    """What the kernels need besides the rows."""

    shape: kernels.Shape
    layers_LF: np.ndarray


class LayerParts:
    """Norms and linears of one layer by their places in forward_kernels."""

    def __init__(
        self, norms: Sequence[tuple[int, RMSNorm]], linears: Sequence[tuple[int, Linear]]
    ) -> None:
        self.norms = norms
        self.linears = linears


def _rows(token_ids_T: Tensor, metadata: AttentionMetadata) -> kernels.Rows:
    table_BP = metadata.block_table_BP
    return kernels.Rows(
        token_ids=address_of(token_ids_T, torch.int64),
        positions=address_of(metadata.positions_T, torch.int64),
        slots=address_of(metadata.slots_T, torch.int64),
        query_start=address_of(metadata.query_start_B1, torch.int32),
        context_lens=address_of(metadata.context_lens_B, torch.int32),
        num_causal=address_of(metadata.num_causal_B, torch.int32),
        ancestors=address_of(metadata.ancestors_T, torch.int64),
        block_table=address_of(table_BP, torch.int32),
        num_rows=len(token_ids_T),
        num_requests=len(metadata.context_lens_B),
        table_stride=table_BP.shape[1],
    )
