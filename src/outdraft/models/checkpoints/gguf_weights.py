"""The tensors of a GGUF file, by the names of Hugging Face checkpoints.

Kinds of blocks that tiles can hold stay as they are; the gguf package gives the numbers of others.

Dimension key: E outputs.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.core.weights import BLOCK_FORMATS, WeightFormat
from outdraft.kernels.data.block_weight import BlockRows, dequantised
from outdraft.models.checkpoints.gguf_file import GgufTensor, open_gguf
from outdraft.models.checkpoints.gguf_metadata import FREQUENCIES
from outdraft.models.checkpoints.stored import StoredWeight

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
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def gguf_weights(path: Path) -> dict[str, StoredWeight]:
    """All tensors of the file.

    Raises:
        ConfigError: the file is damaged, or has a tensor that is not known.
    """
    file = open_gguf(path)
    values = file.values
    heads: dict[str, int] = {}
    if values["general.architecture"] == "llama":  # llama.cpp keeps them in another order
        heads["attn_q"] = int(values["llama.attention.head_count"])
        heads["attn_k"] = int(values.get("llama.attention.head_count_kv", heads["attn_q"]))
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


def stored_tensor(tensor: GgufTensor, num_heads: int | None) -> StoredWeight:
    """One tensor as a weight.

    Args:
        num_heads: of a tensor whose rows are to be put into Hugging Face's order.
    """
    kind, shape = tensor.kind, tensor.shape
    order_E = None if num_heads is None else _row_order(shape[0], num_heads)
    # The blocks of a matrix can stay as they are.
    is_blocks = len(shape) > 1 and kind.lower() in BLOCK_FORMATS
    tile = WeightFormat(kind.lower()) if is_blocks else None
    is_plain = kind in _PLAIN
    has_reason = tile is None and not is_plain and len(shape) > 1
    return StoredWeight(
        shape=shape,
        label=f"GGUF, {kind}",
        group_inputs=tensor.raw.shape[1] if tile is None else tile.group_inputs,
        tile=tile,
        reason=f"there are no tiles for {kind}" if has_reason else "",
        is_plain=is_plain,
        read=partial(_read, tensor, tile, order_E),
    )


def _row_order(num_rows: int, num_heads: int) -> np.ndarray:
    """int64 [E]: the row of the file for each of ours. A head's halves are interleaved."""
    if num_heads < 1 or num_rows % (2 * num_heads):
        raise ConfigError(f"GGUF: {num_rows} rows are no {num_heads} heads with two halves")
    rows = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return rows.transpose(0, 2, 1).reshape(-1)


def _read(
    tensor: GgufTensor, tile: WeightFormat | None, order_E: np.ndarray | None
) -> BlockRows | Tensor:
    if tile is not None:
        return BlockRows(tile, tensor.shape[-1], tensor.raw, order_E)
    if (dtype := _PLAIN.get(tensor.kind)) is None:
        numbers = dequantised(tensor.raw, tensor.kind)
    else:
        numbers = torch.from_numpy(tensor.raw.copy()).view(dtype)
    numbers = numbers.reshape(tensor.shape)
    return numbers if order_E is None else numbers[torch.from_numpy(order_E)]
