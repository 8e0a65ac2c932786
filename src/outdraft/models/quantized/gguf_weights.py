"""The tensors of a GGUF file, by the names of Hugging Face checkpoints.

Blocks of Q8_0, Q4_0 and Q4_K are integers in groups of 32 inputs: llama.cpp, ggml-common.h and
ggml-quants.c. The gguf package gives the numbers of all other kinds.

Dimension key: D inputs, E outputs, N groups of inputs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.core.weight_format import WeightFormat
from outdraft.models.quantized.gguf_file import GgufTensor, open_gguf
from outdraft.models.quantized.gguf_metadata import FREQUENCIES
from outdraft.models.quantized.stored import GroupedCodes, StoredWeight

_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GROUP = 32
_PLAIN = {"F32": "<f4", "F16": "<f2"}


def gguf_weights(path: Path) -> dict[str, StoredWeight]:
    """All tensors of the file.

    Raises:
        ConfigError: the file is damaged, or has a tensor that is not known.
    """
    file = open_gguf(path)
    values = file.values
    heads = _turned_heads(values) if values["general.architecture"] == "llama" else {}
    stored: dict[str, StoredWeight] = {}
    for tensor in file.tensors.values():
        if tensor.name != FREQUENCIES:
            name, module = _slot_name(tensor.name)
            stored[name] = stored_tensor(tensor, heads.get(module))
    return stored


def _slot_name(name: str) -> tuple[str, str]:
    """The name in a Hugging Face checkpoint, and what GGUF calls the module."""
    parts = name.split(".")
    prefix = ""
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit():
        prefix, parts = f"model.layers.{int(parts[1])}.", parts[2:]
    if len(parts) != 2 or parts[0] not in _MODULES:
        raise ConfigError(f"the GGUF file has a tensor {name!r} that is not supported")
    return f"{prefix}{_MODULES[parts[0]]}.{parts[1]}", parts[0]


def _turned_heads(values: Mapping[str, Any]) -> dict[str, int]:
    """The heads of queries and keys, which llama.cpp keeps in another order for this family."""
    num_heads = int(values["llama.attention.head_count"])
    num_kv_heads = int(values.get("llama.attention.head_count_kv", num_heads))
    return {"attn_q": num_heads, "attn_k": num_kv_heads}


def stored_tensor(tensor: GgufTensor, num_heads: int | None) -> StoredWeight:
    """One tensor as a weight.

    Args:
        num_heads: of a tensor whose rows are to be put into Hugging Face's order.
    """
    kind, shape = tensor.kind, tensor.shape
    order_E = None if num_heads is None else _row_order(shape[0], num_heads)
    tile, reason = _TILES.get(kind), ""
    if tile is None:
        reason = f"there are no tiles for {kind}"
    is_plain = kind in _PLAIN or kind == "BF16"
    if is_plain or len(shape) == 1:
        tile, reason = None, ""
    return StoredWeight(
        shape=shape,
        label=f"GGUF, {kind}",
        group_inputs=_GROUP,
        tile=tile,
        reason=reason,
        is_plain=is_plain,
        read=partial(_read, tensor, shape, order_E),
    )


def _row_order(num_rows: int, num_heads: int) -> Tensor:
    """int64 [E]: the row of the file for each of ours. A head's halves lie beside each other."""
    rows = torch.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return rows.transpose(1, 2).reshape(-1)


def _read(
    tensor: GgufTensor, shape: tuple[int, ...], order_E: Tensor | None
) -> GroupedCodes | Tensor:
    kind = tensor.kind
    if len(shape) == 2 and kind in _CODES:
        codes = _CODES[kind](tensor.raw, shape)
        return codes if order_E is None else codes.part(order_E, slice(0, shape[1]))
    numbers = _numbers(tensor, kind).reshape(shape)
    return numbers if order_E is None else numbers[order_E]


def _numbers(tensor: GgufTensor, kind: str) -> Tensor:
    if kind in _PLAIN:
        return torch.from_numpy(tensor.raw.copy().view(_PLAIN[kind]))
    if kind == "BF16":
        return torch.from_numpy(tensor.raw.copy()).view(torch.bfloat16)
    try:
        from gguf import GGMLQuantizationType, dequantize
    except ImportError:
        raise ConfigError(
            f"GGUF tensors of kind {kind} need the gguf package: pip install 'outdraft[gguf]'"
        ) from None
    try:
        return torch.from_numpy(np.array(dequantize(tensor.raw, GGMLQuantizationType[kind])))
    except NotImplementedError as error:
        raise ConfigError(f"GGUF: tensors of kind {kind} are not supported") from error


def _blocks(raw: np.ndarray, shape: tuple[int, ...], block_bytes: int) -> np.ndarray:
    """uint8 [E, blocks of an output, block_bytes]."""
    return raw.reshape(shape[0], -1, block_bytes)


def _float16(blocks: np.ndarray, first: int) -> Tensor:
    """float32 [E, blocks], of two bytes of each block."""
    pairs = np.ascontiguousarray(blocks[..., first : first + 2]).view(np.float16)
    return torch.from_numpy(pairs[..., 0].astype(np.float32))


def _q8_0(raw: np.ndarray, shape: tuple[int, ...]) -> GroupedCodes:
    """A scale, then 32 numbers."""
    blocks = _blocks(raw, shape, 34)
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(shape)
    return GroupedCodes(8, _GROUP, torch.from_numpy(codes), _float16(blocks, 0))


def _q4_0(raw: np.ndarray, shape: tuple[int, ...]) -> GroupedCodes:
    """A scale, then 16 bytes: the low halves are the first 16 numbers, 8 being zero."""
    blocks = _blocks(raw, shape, 18)
    halves = np.concatenate((blocks[..., 2:] & 15, blocks[..., 2:] >> 4), axis=-1)
    codes = (halves.astype(np.int8) - 8).reshape(shape)
    return GroupedCodes(4, _GROUP, torch.from_numpy(codes), _float16(blocks, 0))


def _q4_k(raw: np.ndarray, shape: tuple[int, ...]) -> GroupedCodes:
    """Eight groups of 32: w = d * scale * q - dmin * least, scales and leasts of 6 bits each.

    That is size * (q - 8 + shift); a group whose scale is zero has codes of zero and a shift of -1.
    """
    blocks = _blocks(raw, shape, 144)
    packed = blocks[..., 4:16].reshape(*blocks.shape[:2], 3, 4)
    low, middle, high = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 2 & 48)), axis=-1)
    leasts = np.concatenate((middle & 63, (high >> 4) | (middle >> 2 & 48)), axis=-1)
    quarters = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    fields = (quarters >> np.array([0, 4], np.uint8).reshape(2, 1)) & 15
    codes_ED = torch.from_numpy((fields.astype(np.int8) - 8).reshape(shape))
    size_EN, least_EN = (
        (_float16(blocks, first)[..., None] * torch.from_numpy(parts.astype(np.float32))).flatten(1)
        for first, parts in ((0, scales), (2, leasts))
    )
    is_flat_EN = size_EN == 0
    shift_EN = torch.where(is_flat_EN, -1.0, 8 - least_EN / size_EN)
    is_flat_ED = is_flat_EN.repeat_interleave(_GROUP, dim=1)
    return GroupedCodes(
        4,
        _GROUP,
        codes_ED.masked_fill_(is_flat_ED, 0),
        torch.where(is_flat_EN, least_EN, size_EN),
        shift_EN,
    )


_CODES: dict[str, Callable[[np.ndarray, tuple[int, ...]], GroupedCodes]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_K": _q4_k,
}
_TILES = {
    "Q8_0": WeightFormat.INT8_G32,
    "Q4_0": WeightFormat.INT4_G32,
    "Q4_K": WeightFormat.INT4_G32_ZERO,
}
