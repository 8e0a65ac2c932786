"""Whole drafts of networks of blocks by the compiled library, see csrc/block_draft.cpp.

Dimension key: T rows, D hidden.
"""

import ctypes
from ctypes import POINTER, c_int64, c_void_p

import torch
from torch import Tensor

from outdraft.kernels.draft_ops import BlockSpec, Growth, ModelDrafts, UnreadTexts
from outdraft.kernels.native.arrays import address_of
from outdraft.kernels.native.drafting import (
    CDraftTask,
    CUnreadTexts,
    NativeGrowth,
    UnreadArrays,
)
from outdraft.kernels.native.library import Library
from outdraft.kernels.native.linear import weights_of
from outdraft.kernels.products import Product


class _CBlockSpec(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_rows", "first_draft", "mask_token", "is_causal")),
        *((name, c_void_p) for name in ("context", "pair_embedding", "pairs", "confidence")),
        *((name, c_int64) for name in ("confidence_reads_token", "pair_rank")),
    )


class NativeBlocks:
    """Keys and values of texts, and whole drafts of blocks, each in one call."""

    def __init__(self, library: Library, growth: NativeGrowth) -> None:
        self._growth = growth
        self._write_context = library.function(
            "decoder_write_context", [*[c_void_p] * 5, c_int64], c_int64, releases_gil=True
        )
        self._draft = library.function(
            "block_draft",
            [c_void_p, POINTER(CDraftTask), POINTER(CUnreadTexts), POINTER(_CBlockSpec)],
            c_int64,
            releases_gil=True,
        )
        self._newest: tuple[BlockSpec, _CBlockSpec] | None = None

    def write_context(
        self,
        decoder: int,
        product: Product,
        features_TD: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
    ) -> None:
        """Compute `DecoderPass.write_context` for the `Decoder` with this address."""
        features_TD = features_TD.contiguous()
        is_valid = self._write_context(
            decoder,
            weights_of(product),
            features_TD.data_ptr(),
            address_of(positions_T, torch.int64),
            address_of(slots_T, torch.int64),
            len(features_TD),
        )
        assert is_valid, "a position is out of its table"

    def draft(
        self,
        decoder: int,
        spec: BlockSpec,
        unread: UnreadTexts,
        growth: Growth,
        dtype: torch.dtype,
    ) -> ModelDrafts:
        """Compute `DecoderPass.draft_block` for the `Decoder` with this address."""
        if self._newest is None or self._newest[0] is not spec:
            self._newest = spec, _block(spec, dtype)
        task, texts = self._growth.task(growth), UnreadArrays(unread, dtype)
        is_valid = self._draft(
            decoder,
            ctypes.byref(task.native),
            ctypes.byref(texts.native),
            ctypes.byref(self._newest[1]),
        )
        assert is_valid, "a token or a position is out of its table"
        return task.drafts()


def _block(spec: BlockSpec, dtype: torch.dtype) -> _CBlockSpec:
    embedding_VM = spec.pair_embedding_VM
    return _CBlockSpec(
        spec.num_rows,
        spec.first_draft,
        spec.mask_token_id,
        spec.is_causal,
        weights_of(spec.context),
        None if embedding_VM is None else address_of(embedding_VM, dtype),
        None if spec.pairs is None else weights_of(spec.pairs),
        None if spec.confidence is None else weights_of(spec.confidence),
        spec.confidence_reads_token,
        0 if embedding_VM is None else embedding_VM.shape[1],
    )
