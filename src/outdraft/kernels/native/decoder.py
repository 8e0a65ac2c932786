"""Whole passes of a decoder by the compiled library, see csrc/forward.h.

Dimension key: T rows, R rows whose logits are wanted, D hidden, K tapped layers, N the head's own
vocabulary.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.kernels.data.logits import most_logit_rows
from outdraft.kernels.decoder_ops import DecoderPass, DecoderSpec
from outdraft.kernels.draft_ops import BlockSpec, Growth, ModelDrafts, UnreadTexts
from outdraft.kernels.native.arrays import address_of, index_array
from outdraft.kernels.native.attention import limit
from outdraft.kernels.native.block_drafting import NativeBlocks
from outdraft.kernels.native.drafting import NativeGrowth
from outdraft.kernels.native.library import Team
from outdraft.kernels.native.linear import weights_of
from outdraft.kernels.native.ranks import RankLink, shares_memory
from outdraft.kernels.native.step import NativeStep
from outdraft.kernels.products import Product, RowParallel, VocabParallel
from outdraft.kernels.step_ops import StepRead, StepTask
from outdraft.kernels.torch.decoder import TorchDecoder


class _CDecoderLayer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("qkv", "o", "gate_up", "down", "o_bias", "down_bias")),
        ("window", c_int64),
    )


class _CDecoderSpec(ctypes.Structure):
    _fields_ = (
        ("team", c_void_p),
        *((name, c_int64) for name in ("hidden", "intermediate", "num_heads", "num_kv_heads")),
        *((name, c_int64) for name in ("head_size", "num_layers", "num_positions", "num_tokens")),
        ("dtype", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        *((name, c_void_p) for name in ("embedding", "embedding_codes", "cos_sin", "final_norm")),
        ("layers", POINTER(_CDecoderLayer)),
        *((name, c_int32) for name in ("reads_states", "adds_to_normed", "leaves_out_first")),
        *((name, c_void_p) for name in ("token_norm", "state_norm", "fc")),
        *((name, c_void_p) for name in ("head", "head_norm", "draft_ids", "ranks")),
        *((name, c_int64) for name in ("first_token", "num_own_tokens")),
        *((name, c_int64) for name in ("num_columns", "num_outputs", "num_first_drafts")),
    )


class _CDecoderRows(ctypes.Structure):
    """The rows of a pass: addresses of tensors of AttentionMetadata, then numbers."""

    _fields_ = (
        *((name, c_void_p) for name in ("token_ids", "positions", "slots", "query_start")),
        *((name, c_void_p) for name in ("context_lens", "num_causal", "ancestors", "block_table")),
        *((name, c_int64) for name in ("num_rows", "num_requests", "table_stride")),
        ("wanted", c_void_p),
        ("num_wanted", c_int64),
    )


class NativeDecoder:
    """The passes of a decoder, for float32 and bfloat16 on the CPU.

    Residuals and sums are float32. In a bfloat16 decoder these numbers are rounded: inputs of
    products, cached keys and values, and what is returned.
    """

    def __init__(self, team: Team, spec: DecoderSpec) -> None:
        self._spec, self._team = spec, team
        self._dtype = spec.embedding.dtype
        self._kept: list[Tensor] = []  # float32; they live as long as this object
        self._link = None if spec.shard is None else RankLink(spec.shard.group)
        self._layers = (_CDecoderLayer * len(spec.layers))(
            *(
                _CDecoderLayer(
                    *map(self._vector, (each.input_norm_D, each.post_norm_D)),
                    *map(self._vector, (each.q_norm_C, each.k_norm_C)),
                    *map(weights_of, (each.qkv, each.o, each.gate_up, each.down)),
                    *map(self._vector, map(_sum_bias, (each.o, each.down))),
                    limit(each.window),
                )
                for each in spec.layers
            )
        )
        self._native_spec = self._describe()
        function, handle = team.library.function, c_void_p
        self._create = function(
            "decoder_create", [POINTER(_CDecoderSpec), c_void_p, c_int64], handle, releases_gil=True
        )
        self._destroy = function("decoder_destroy", [handle], releases_gil=True)
        of_pass = [handle, POINTER(_CDecoderRows), c_void_p, c_void_p, c_int64, c_void_p, c_void_p]
        of_states = [handle, c_void_p, c_int64]
        self._forward = function("decoder_forward", of_pass, c_int64, releases_gil=True)
        self._logits = function("decoder_logits", [*of_states, c_void_p], releases_gil=True)
        self._best_tokens = function(
            "decoder_best_tokens", [*of_states, c_void_p, c_void_p], c_int64, releases_gil=True
        )
        self._growth = NativeGrowth(team.library)
        self._step = NativeStep(team.library)
        self._blocks = NativeBlocks(team.library, self._growth)
        self._bound: dict[tuple[int, ...], int] = {}
        # For what needs no caches.
        self._unbound = self._create(ctypes.byref(self._native_spec), self._no_caches(), 1)
        weakref.finalize(self, self._destroy, self._unbound).atexit = False
        self._num_columns: int = function("decoder_num_columns", [handle], c_int64)(self._unbound)

    def __call__(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int] = (),
        states_TD: Tensor | None = None,
        wanted_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if wanted_R is not None and len(self._spec.layers) in taps:  # taps are of all rows
            states_TD, tapped_TKD = self(token_ids_T, caches, metadata, taps, states_TD)
            return states_TD.index_select(0, wanted_R), tapped_TKD
        size = self._spec.embedding.size
        num_rows = token_ids_T.shape[0]
        rows = rows_of(metadata, address_of(token_ids_T, torch.int64), wanted_R)
        out_RD = torch.empty((rows.num_wanted, size), dtype=self._dtype)
        tapped_TKD = torch.empty((num_rows, len(taps), size), dtype=self._dtype)
        states_TD = None if states_TD is None else states_TD.contiguous()
        is_valid = self._forward(
            self.handle(caches),
            ctypes.byref(rows),
            None if states_TD is None else address_of(states_TD, self._dtype),
            index_array(tuple(taps)),
            len(taps),
            tapped_TKD.data_ptr(),
            out_RD.data_ptr(),
        )
        self._settle()
        assert is_valid, "a token or a position is out of its table"
        return out_RD, tapped_TKD

    def logits(self, states_RD: Tensor) -> Tensor:
        states_RD = states_RD.contiguous()
        logits_RN = torch.empty((len(states_RD), self._num_columns), dtype=torch.float32)
        address = address_of(states_RD, self._dtype)
        self._logits(self._unbound, address, len(states_RD), logits_RN.data_ptr())
        return logits_RN

    def best_tokens(self, states_RD: Tensor) -> tuple[Tensor, Tensor]:
        states_RD = states_RD.contiguous()
        num_rows = states_RD.shape[0]
        ids_R = torch.empty(num_rows, dtype=torch.int64)
        is_finite_R = torch.empty(num_rows, dtype=torch.bool)
        self._best_tokens(
            self._unbound,
            address_of(states_RD, self._dtype),
            num_rows,
            ids_R.data_ptr(),
            is_finite_R.data_ptr(),
        )
        self._settle()
        return ids_R, is_finite_R

    def step(self, task: StepTask, by_parts: Callable[[], StepRead]) -> StepRead:
        if self._link is not None or not self._keeps_logits(task):
            return by_parts()
        size = self._spec.embedding.size
        return self._step.read(self.handle(task.caches), task, size, self._dtype)

    def draft(
        self, unread: UnreadTexts, growth: Growth, by_levels: Callable[[], ModelDrafts]
    ) -> ModelDrafts:
        reads_as_many, num_outputs = self._spec.draft_ids_N is not None, self._num_columns
        if self._spec.shard is not None:
            assert growth.shares.group is self._spec.shard.group
            assert isinstance(self._spec.head, VocabParallel)
            num_outputs = self._spec.head.shard.num_tokens
        assert reads_as_many or num_outputs == growth.sampling.vocab_size
        handle = self.handle(unread.caches)
        return self._growth.draft(handle, unread, growth, self._dtype, self._link)

    def write_context(
        self,
        product: Product,
        features_TD: Tensor,
        caches: Sequence[LayerCache],
        positions_T: Tensor,
        slots_T: Tensor,
    ) -> None:
        assert features_TD.dtype is self._dtype
        self._blocks.write_context(self.handle(caches), product, features_TD, positions_T, slots_T)

    def draft_block(
        self,
        spec: BlockSpec,
        unread: UnreadTexts,
        growth: Growth,
        by_levels: Callable[[], ModelDrafts],
    ) -> ModelDrafts:
        if self._link is not None:
            return by_levels()
        return self._blocks.draft(self.handle(unread.caches), spec, unread, growth, self._dtype)

    def handle(self, caches: Sequence[LayerCache]) -> int:
        """Address of the `Decoder` with these caches; it lives as long as they do."""
        first, last = caches[0].k_PSGC, caches[-1].v_PSGE
        key = (first.data_ptr(), last.data_ptr(), first.shape[1])
        handle = self._bound.get(key)
        if handle is None:
            addresses = [
                address_of(tensor, self._dtype)
                for cache in caches
                for tensor in (cache.k_PSGC, cache.v_PSGE)
            ]
            assert len(addresses) == 2 * len(self._layers)
            array = (c_void_p * len(addresses))(*addresses)
            handle = self._create(ctypes.byref(self._native_spec), array, first.shape[1])
            self._bound[key] = handle
            # Before the memory of the caches is given back, no late helper may read it.
            weakref.finalize(first, self._unbind, key).atexit = False
        return handle

    def _keeps_logits(self, task: StepTask) -> bool:
        """One call may have the logits of all rows that it chooses by, as a part has."""
        if task.chooser is None or task.chooser.sampling.is_plain_greedy:
            return True  # it has those of few rows at a time
        num_rows = sum([1 + len(span.parents) for span in task.spans if span.samples])
        most = most_logit_rows(self._num_columns, torch.float32, task.token_ids_SL.device)
        return num_rows <= most and (task.drafts is None or task.drafts.prob_rows_B is None)

    def _unbind(self, key: tuple[int, ...]) -> None:
        self._destroy(self._bound.pop(key))

    def _settle(self) -> None:
        """Raises RanksError if another rank did not answer in a call."""
        if self._link is not None:
            self._link.settle()

    def _vector(self, numbers: Tensor | None) -> int | None:
        if numbers is None:
            return None
        self._kept.append(numbers.detach().float().contiguous())
        return self._kept[-1].data_ptr()

    def _no_caches(self) -> ctypes.Array[c_void_p]:
        return (c_void_p * (2 * len(self._layers)))()

    def _describe(self) -> _CDecoderSpec:
        spec, entry = self._spec, self._spec.entry
        table, source = spec.embedding, spec.embedding.source
        is_bf16 = self._dtype is torch.bfloat16
        native = _CDecoderSpec(
            team=self._team.address,
            hidden=table.size,
            intermediate=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.cos_sin_MC.shape[1],
            num_layers=len(spec.layers),
            num_positions=len(spec.cos_sin_MC),
            num_tokens=table.num_tokens,
            dtype=is_bf16,
            eps=spec.eps,
            scale=spec.scale,
            embedding=address_of(source, self._dtype) if isinstance(source, Tensor) else None,
            embedding_codes=None if isinstance(source, Tensor) else weights_of(source),
            num_own_tokens=table.num_tokens,
            cos_sin=address_of(spec.cos_sin_MC, torch.float32),
            final_norm=self._vector(spec.final_norm_D),
            layers=self._layers,
            reads_states=entry is not None,
            adds_to_normed=entry is not None and entry.adds_to_normed,
            leaves_out_first=entry is not None and entry.leaves_out_first,
            token_norm=self._vector(entry and entry.token_norm_D),
            state_norm=self._vector(entry and entry.state_norm_D),
            fc=weights_of(entry.fc) if entry is not None and entry.fc is not None else None,
            head=weights_of(spec.head),
            head_norm=self._vector(spec.head_norm_D),
            draft_ids=None
            if spec.draft_ids_N is None
            else address_of(spec.draft_ids_N, torch.int64),
            num_first_drafts=spec.num_first_drafts,
        )
        if spec.shard is not None and self._link is not None:
            assert isinstance(spec.head, VocabParallel)
            native.ranks = ctypes.addressof(self._link.native)
            native.num_tokens, native.first_token = spec.shard.num_tokens, spec.shard.first
            outputs = spec.head.shard
            native.num_columns, native.num_outputs = outputs.width, outputs.num_tokens
        return native


def compile_decoder(team: Team, spec: DecoderSpec) -> DecoderPass:
    """Prepare the passes of a network whose products are packed.

    They run layer by layer where layers differ in their masks, and where a network is spread over
    ranks that share no memory: those must meet between the parts of each layer.
    """
    are_alike = not any(layer.is_causal for layer in spec.layers)
    can_meet = spec.shard is None or shares_memory(spec.shard.group)
    return NativeDecoder(team, spec) if are_alike and can_meet else TorchDecoder(spec)


def rows_of(metadata: AttentionMetadata, token_ids: int, wanted_R: Tensor | None) -> _CDecoderRows:
    """The rows of a pass, and the address of their tokens; the tensors must stay alive."""
    table_BP, num_rows = metadata.block_table_BP, metadata.slots_T.shape[0]
    return _CDecoderRows(
        token_ids,
        address_of(metadata.positions_T, torch.int64),
        address_of(metadata.slots_T, torch.int64),
        address_of(metadata.query_start_B1, torch.int32),
        address_of(metadata.context_lens_B, torch.int32),
        address_of(metadata.num_causal_B, torch.int32),
        address_of(metadata.ancestors_T, torch.int64),
        address_of(table_BP, torch.int32),
        num_rows,
        metadata.context_lens_B.shape[0],
        table_BP.shape[1],
        None if wanted_R is None else address_of(wanted_R, torch.int64),
        num_rows if wanted_R is None else wanted_R.shape[0],
    )


def _sum_bias(product: Product) -> Tensor | None:
    """[D]: what is added to a sum over ranks."""
    return product.bias_E if isinstance(product, RowParallel) else None
