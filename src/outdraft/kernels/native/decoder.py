"""Whole passes of a decoder by the compiled library, see csrc/forward.h.

Dimension key: T rows, R rows whose logits are wanted, D hidden, K tapped layers, N the head's own
vocabulary.
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.data.logits import most_logit_rows
from outdraft.kernels.decoder_ops import DecoderPass, DecoderSpec, LayerSpec, StepRead, StepTask
from outdraft.kernels.draft_ops import BlockSpec, Growth, UnreadTexts
from outdraft.kernels.native.attention import batch_fields, limit
from outdraft.kernels.native.drafting import draft_task, unread_texts
from outdraft.kernels.native.library import Struct, Team
from outdraft.kernels.native.linear import float32, weights_of
from outdraft.kernels.native.ranks import RankLink, shares_memory
from outdraft.kernels.native.step import step_task
from outdraft.kernels.products import Product, RowParallel, VocabParallel
from outdraft.kernels.torch.decoder import TorchDecoder


class NativeDecoder:
    """The passes of a decoder, for float32 and bfloat16 on the CPU.

    Residuals and sums are float32. In a bfloat16 decoder these numbers are rounded: inputs of
    products, cached keys and values, and what is returned.
    """

    def __init__(self, team: Team, spec: DecoderSpec) -> None:
        self._spec, self._team, self._library = spec, team, team.library
        self._dtype = spec.embedding.dtype
        self._link = None if spec.shard is None else RankLink(spec.shard.group)
        self._native_spec = self._describe()
        function = team.library.function
        long = partial(function, releases_gil=True)
        self._create, self._destroy = long("decoder_create"), long("decoder_destroy")
        self._forward, self._logits = long("decoder_forward"), long("decoder_logits")
        self._best_tokens = long("decoder_best_tokens")
        self._write_context = long("decoder_write_context")
        self._step, self._draft = long("decoder_step"), long("decoder_draft")
        self._draft_block = long("block_draft")
        self._bound: dict[tuple[int, ...], int] = {}
        # For what needs no caches.
        self._unbound = self._create(self._native_spec, [0] * 2 * len(spec.layers), 1)
        weakref.finalize(self, self._destroy, self._unbound).atexit = False
        self._num_columns: int = function("decoder_num_columns")(self._unbound)

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
        num_rows, size = token_ids_T.shape[0], self._spec.embedding.size
        num_wanted = num_rows if wanted_R is None else wanted_R.shape[0]
        rows = self._library.struct(
            "DecoderRows",
            token_ids=token_ids_T,
            slots=metadata.slots_T,
            **batch_fields(metadata),
            num_rows=num_rows,
            wanted=wanted_R,
            num_wanted=num_wanted,
        )
        out_RD = torch.empty((num_wanted, size), dtype=self._dtype)
        tapped_TKD = torch.empty((num_rows, len(taps), size), dtype=self._dtype)
        assert states_TD is None or states_TD.dtype is self._dtype
        handle = self.handle(caches)
        is_valid = self._forward(handle, rows, states_TD, taps, len(taps), tapped_TKD, out_RD)
        self._settle(is_valid)
        return out_RD, tapped_TKD

    def logits(self, states_RD: Tensor) -> Tensor:
        assert states_RD.dtype is self._dtype
        logits_RN = torch.empty((len(states_RD), self._num_columns), dtype=torch.float32)
        self._logits(self._unbound, states_RD, len(states_RD), logits_RN)
        return logits_RN

    def best_tokens(self, states_RD: Tensor) -> tuple[Tensor, Tensor]:
        assert states_RD.dtype is self._dtype
        num_rows = states_RD.shape[0]
        ids_R = torch.empty(num_rows, dtype=torch.int64)
        is_finite_R = torch.empty(num_rows, dtype=torch.bool)
        self._best_tokens(self._unbound, states_RD, num_rows, ids_R, is_finite_R)
        self._settle()
        return ids_R, is_finite_R

    def write_context(
        self,
        product: Product,
        features_TD: Tensor,
        caches: Sequence[LayerCache],
        positions_T: Tensor,
        slots_T: Tensor,
    ) -> None:
        assert features_TD.dtype is self._dtype
        is_valid = self._write_context(
            *(self.handle(caches), weights_of(product), features_TD, positions_T, slots_T),
            len(features_TD),
        )
        assert is_valid, "a position is out of its table"

    @property
    def fused(self) -> "NativeDecoder":
        return self

    def step(self, task: StepTask) -> StepRead | None:
        if self._link is not None or not self._keeps_logits(task):
            return None
        native, read = step_task(self._library, task, self._spec.embedding.size, self._dtype)
        is_valid = self._step(self.handle(task.caches), native)
        self._settle(is_valid)
        return read

    def draft(self, unread: UnreadTexts, growth: Growth) -> DraftBatch:
        reads_as_many, num_outputs = self._spec.draft_ids_N is not None, self._num_columns
        if self._spec.shard is not None:
            assert growth.shares.group is self._spec.shard.group
            assert isinstance(self._spec.head, VocabParallel)
            num_outputs = self._spec.head.shard.num_tokens
        assert reads_as_many or num_outputs == growth.sampling.vocab_size
        task, drafts = draft_task(self._library, growth)
        shares = None
        if self._link is not None:
            shares = self._library.struct(
                "DraftShares",
                num_requests=len(growth.num_drafts_G),
                counts=growth.shares.counts,
                num_drafts=growth.num_drafts_G,
            )
        texts = unread_texts(self._library, unread, self._dtype)
        is_valid = self._draft(self.handle(unread.caches), task, texts, shares)
        self._settle(is_valid)
        return drafts

    def draft_block(
        self, spec: BlockSpec, unread: UnreadTexts, growth: Growth
    ) -> DraftBatch | None:
        if self._link is not None:
            return None
        task, drafts = draft_task(self._library, growth)
        embedding_VM = spec.pair_embedding_VM
        assert embedding_VM is None or embedding_VM.dtype is self._dtype
        block = self._library.struct(
            "BlockSpec",
            num_rows=spec.num_rows,
            first_draft=spec.first_draft,
            mask_token=spec.mask_token_id,
            is_causal=spec.is_causal,
            context=weights_of(spec.context),
            pair_embedding=embedding_VM,
            pairs=spec.pairs and weights_of(spec.pairs),
            confidence=spec.confidence and weights_of(spec.confidence),
            confidence_reads_token=spec.confidence_reads_token,
            pair_rank=0 if embedding_VM is None else embedding_VM.shape[1],
        )
        texts = unread_texts(self._library, unread, self._dtype)
        is_valid = self._draft_block(self.handle(unread.caches), task, texts, block)
        self._settle(is_valid)
        return drafts

    def handle(self, caches: Sequence[LayerCache]) -> int:
        """Address of the `Decoder` with these caches; it lives as long as they do."""
        first, last = caches[0].k_PSGC, caches[-1].v_PSGE
        key = (first.data_ptr(), last.data_ptr(), first.shape[1])
        handle = self._bound.get(key)
        if handle is None:
            tensors = [tensor for cache in caches for tensor in (cache.k_PSGC, cache.v_PSGE)]
            assert len(caches) == len(self._spec.layers)
            assert all(one.dtype is self._dtype and one.is_contiguous() for one in tensors)
            addresses = [tensor.data_ptr() for tensor in tensors]
            handle = self._create(self._native_spec, addresses, first.shape[1])
            self._bound[key] = handle
            # Before the memory of the caches is given back, no late helper may read it.
            weakref.finalize(first, self._unbind, key).atexit = False
        return handle

    def _keeps_logits(self, task: StepTask) -> bool:
        """One call may have the logits of all rows that it chooses by, as a part has."""
        if task.sampling is None or task.sampling.is_plain_greedy:
            return True  # it has those of few rows at a time
        num_rows = sum([1 + len(span.parents) for span in task.spans if span.samples])
        most = most_logit_rows(self._num_columns, torch.float32, task.token_ids_SL.device)
        return num_rows <= most and (task.drafts is None or task.drafts.prob_rows_B is None)

    def _unbind(self, key: tuple[int, ...]) -> None:
        self._destroy(self._bound.pop(key))

    def _settle(self, is_valid: object = True) -> None:
        """Raises RanksError if another rank did not answer in a call; AssertionError if the call
        found wrong inputs."""
        if self._link is not None:
            self._link.settle()
        assert is_valid, "a token or a position is out of its table"

    def _describe(self) -> Struct:
        spec, entry, struct = self._spec, self._spec.entry, self._library.struct
        table, source = spec.embedding, spec.embedding.source
        is_table = isinstance(source, Tensor)
        assert not is_table or source.dtype is self._dtype
        native = struct(
            "DecoderSpec",
            team=self._team.address,
            hidden=table.size,
            intermediate=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.cos_sin_MC.shape[1],
            num_layers=len(spec.layers),
            num_positions=len(spec.cos_sin_MC),
            num_tokens=table.num_tokens,
            dtype=self._dtype is torch.bfloat16,
            eps=spec.eps,
            scale=spec.scale,
            embedding=source if is_table else None,
            embedding_codes=None if is_table else weights_of(source),
            num_own_tokens=table.num_tokens,
            cos_sin=spec.cos_sin_MC,
            final_norm=float32(spec.final_norm_D),
            layers=[struct("DecoderLayer", **_layer_fields(layer)) for layer in spec.layers],
            head=weights_of(spec.head),
            head_norm=float32(spec.head_norm_D),
            draft_ids=spec.draft_ids_N,
            num_first_drafts=spec.num_first_drafts,
        )
        if entry is not None:
            native.fill(
                reads_states=True,
                adds_to_normed=entry.adds_to_normed,
                leaves_out_first=entry.leaves_out_first,
                token_norm=float32(entry.token_norm_D),
                state_norm=float32(entry.state_norm_D),
                fc=entry.fc and weights_of(entry.fc),
            )
        if spec.shard is not None and self._link is not None:
            assert isinstance(spec.head, VocabParallel)
            native.fill(
                ranks=self._link.native,
                num_tokens=spec.shard.num_tokens,
                first_token=spec.shard.first,
                num_columns=spec.head.shard.width,
                num_outputs=spec.head.shard.num_tokens,
            )
        return native


def compile_decoder(team: Team, spec: DecoderSpec) -> DecoderPass:
    """Prepare the passes of a network whose products are packed.

    They run layer by layer where layers differ in their masks, and where a network is spread over
    ranks that share no memory: those must meet between the parts of each layer.
    """
    are_alike = not any(layer.is_causal for layer in spec.layers)
    can_meet = spec.shard is None or shares_memory(spec.shard.group)
    return NativeDecoder(team, spec) if are_alike and can_meet else TorchDecoder(spec)


def _layer_fields(layer: LayerSpec) -> dict[str, Any]:
    """The fields of `DecoderLayer`, csrc/forward.h."""
    products = {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.gate_up, "down": layer.down}
    vectors = {
        "input_norm": layer.input_norm_D,
        "post_norm": layer.post_norm_D,
        "q_norm": layer.q_norm_C,
        "k_norm": layer.k_norm_C,
        # What is added to a sum over ranks.
        "o_bias": layer.o.bias_E if isinstance(layer.o, RowParallel) else None,
        "down_bias": layer.down.bias_E if isinstance(layer.down, RowParallel) else None,
    }
    return {
        "window": limit(layer.window),
        **{name: weights_of(product) for name, product in products.items()},
        **{name: float32(numbers) for name, numbers in vectors.items()},
    }
