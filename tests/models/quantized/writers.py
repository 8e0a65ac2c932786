"""Tiny checkpoints in the published formats, written by the libraries that made them, or by the
formats' definitions, number by number. A writer also tells the numbers that its tensors stand for.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.models.checkpoints import llama, randomised

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}


@dataclass
class Written:
    """What stands for one weight: its tensors by the ends of their names, and float32 numbers."""

    tensors: dict[str, Tensor]
    numbers_ED: Tensor


Writer = Callable[[Tensor], Written]


@dataclass
class Format:
    """A published format: how it writes a weight, and what config.json says of it."""

    write: Writer
    config: dict[str, Any]
    ignored: tuple[str, ...] = ("lm_head",)
    dtype: torch.dtype = field(default=torch.bfloat16)


def small_llama(**changes: Any) -> PreTrainedModel:
    return randomised(llama(**SIZES | changes))


def save_quantized(
    model: PreTrainedModel, path: Path, stored_as: Format, *, rounds: bool
) -> PreTrainedModel:
    """Write the checkpoint; the model gets the numbers of what was written.

    Args:
        rounds: to bfloat16, as what is dequantised.
    """
    copy.deepcopy(model).to(stored_as.dtype).save_pretrained(path)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(stored_as.dtype))
    tensors = load_file(path / "model.safetensors")
    numbers: dict[str, Tensor] = {}
    for name in [name for name in tensors if name.endswith("_proj.weight") or "lm_head" in name]:
        module = name.removesuffix(".weight")
        if module in stored_as.ignored:
            continue
        written = stored_as.write(tensors.pop(name).float())
        tensors |= {f"{module}.{part}": one.contiguous() for part, one in written.tensors.items()}
        numbers[name] = written.numbers_ED.bfloat16() if rounds else written.numbers_ED
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = stored_as.config
    (path / "config.json").write_text(json.dumps(config))
    assert not model.load_state_dict(numbers, strict=False).unexpected_keys
    return model


def grid(
    weight_ED: Tensor, bits: int, group: int, *, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scales [E, N] and zero points [E, N], of fields from 0 to 2^bits - 1."""
    most = 2**bits - 1
    groups = weight_ED.unflatten(1, (-1, group))
    if symmetric:
        scale_EN = groups.abs().amax(2) / (most // 2)
        return scale_EN.to(scale_dtype), torch.full_like(scale_EN, (most + 1) // 2)
    low_EN, high_EN = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale_EN = ((high_EN - low_EN) / most).to(scale_dtype)
    return scale_EN, (-low_EN / scale_EN.float()).round().clamp(0, most)


def compressed(
    stored_as: str,
    *,
    bits: int = 4,
    kind: str = "int",
    group: int | None = None,
    strategy: str | None = None,
    symmetric: bool = True,
    block: list[int] | None = None,
    activations: dict[str, Any] | None = None,
    ignore: tuple[str, ...] = ("lm_head",),
    targets: tuple[str, ...] = ("Linear",),
    packs_zeros: bool = True,
) -> Format:
    """By compressed-tensors' own compressors; `packs_zeros`: not so before 2025."""
    args: dict[str, Any] = {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy or ("group" if group else "channel"),
        "symmetric": symmetric,
    }
    args |= {"group_size": group} if group else {}
    args |= {"block_structure": block} if block else {}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    compressor = BaseCompressor.get_value_from_registry(stored_as)

    def write(weight_ED: Tensor) -> Written:
        scale, zero = _compressed_scales(weight_ED, args)
        tensors = {"weight": weight_ED, "weight_scale": scale}
        if zero is not None:
            tensors["weight_zero_point"] = zero
        written = compressor.compress(tensors, scheme)
        exact = written | {"weight_scale": scale.float()}
        numbers_ED = compressor.decompress(exact, scheme)["weight"].float()
        if zero is not None and not packs_zeros:
            written = written | {"weight_zero_point": zero}
        return Written(written, numbers_ED)

    group_config = {"targets": list(targets), "weights": args, "input_activations": activations}
    config = {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "config_groups": {"group_0": group_config},
        "ignore": list(ignore),
        "quantization_status": "compressed",
    }
    return Format(write, config)


def _compressed_scales(weight_ED: Tensor, args: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    if args["strategy"] == "block":
        rows, columns = args["block_structure"]
        blocks = weight_ED.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return (blocks.abs().amax((1, 3)) / 448).bfloat16(), None
    whole = args["strategy"] == "tensor"
    flat = weight_ED.reshape(1, -1) if whole else weight_ED
    if args["type"] == "float":
        scale = (flat.abs().amax(1, keepdim=True) / 448).bfloat16()
        return (scale[0] if whole else scale), None
    group = args.get("group_size") or flat.shape[1]
    scale, field_zero = grid(
        flat, args["num_bits"], group, symmetric=args["symmetric"], scale_dtype=torch.bfloat16
    )
    zero = (field_zero - 2 ** (args["num_bits"] - 1)).to(torch.int8)
    return (scale[0] if whole else scale), None if args["symmetric"] else zero


def _words(fields: np.ndarray, bits: int) -> np.ndarray:
    """int32: along the last dimension, the first field in the lowest bits."""
    per_word = 32 // bits
    words = np.zeros((*fields.shape[:-1], fields.shape[-1] // per_word), dtype=np.uint32)
    for place in range(per_word):
        words |= fields[..., place::per_word].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def gptq(
    *,
    bits: int = 4,
    group: int = 128,
    symmetric: bool = True,
    desc_act: bool = False,
    version: str = "gptq",
    bias: bool = False,
    says: str = "checkpoint_format",
    has_lowest_zeros: bool = False,
    writes_order: bool = True,
) -> Format:
    """As AutoGPTQ's QuantLinear packs: along inputs, zero points less one (in gptq_v2 as they are),
    and with desc_act the groups in the order of g_idx.

    Args:
        says: where config.json names the version.
        has_lowest_zeros: some zero points are 0; less one, their lowest bits are kept.
        writes_order: else g_idx is zeros, which stands for no order.
    """

    def write(weight_ED: Tensor) -> Written:
        num_outputs, num_inputs = weight_ED.shape
        generator = torch.Generator().manual_seed(num_inputs)
        order_D = torch.randperm(num_inputs, generator=generator)
        order_D = order_D if desc_act else torch.arange(num_inputs)
        g_idx_D = torch.empty(num_inputs, dtype=torch.int32)
        g_idx_D[order_D] = torch.arange(num_inputs, dtype=torch.int32) // group
        ordered_ED = weight_ED[:, order_D]
        scale_EN, zero_EN = grid(
            ordered_ED, bits, group, symmetric=symmetric, scale_dtype=torch.float16
        )
        if version == "gptq":
            zero_EN = zero_EN.clamp(min=1)
            zero_EN[::3] *= not has_lowest_zeros
        scale_ED, zero_ED = scale_EN[:, g_idx_D.long()].float(), zero_EN[:, g_idx_D.long()]
        fields_ED = (weight_ED / scale_ED + zero_ED).round().clamp(0, 2**bits - 1)
        stored_EN = (zero_EN - 1) % 2**bits if version == "gptq" else zero_EN
        tensors = {
            "qweight": torch.from_numpy(_words(fields_ED.numpy(), bits)).T,
            "qzeros": torch.from_numpy(_words(stored_EN.T.numpy(), bits)),
            "scales": scale_EN.T,
            "g_idx": g_idx_D if writes_order else torch.zeros_like(g_idx_D),
        }
        if bias:
            tensors["bias"] = torch.zeros(num_outputs, dtype=torch.float16)
        return Written(tensors, (fields_ED - zero_ED) * scale_ED)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": desc_act,
        "sym": symmetric,
        says: version,
    }
    return Format(write, config, dtype=torch.float16)


def awq(*, group: int = 128) -> Format:
    """As AutoAWQ's WQLinear_GEMM packs: along outputs, the word's fields in AWQ's order."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(fields_XE: np.ndarray) -> Tensor:
        packed = np.zeros((fields_XE.shape[0], fields_XE.shape[1] // 8), dtype=np.uint32)
        for column in range(packed.shape[1]):
            for place in range(8):
                one = fields_XE[:, column * 8 + order[place]].astype(np.uint32)
                packed[:, column] |= one << np.uint32(place * 4)
        return torch.from_numpy(packed.view(np.int32))

    def write(weight_ED: Tensor) -> Written:
        scale_EN, zero_EN = grid(weight_ED, 4, group, symmetric=False, scale_dtype=torch.float16)
        scale_ED = scale_EN.float().repeat_interleave(group, 1)
        zero_ED = zero_EN.repeat_interleave(group, 1)
        fields_ED = (weight_ED / scale_ED + zero_ED).round().clamp(0, 15)
        tensors = {
            "qweight": words(fields_ED.T.numpy()),
            "qzeros": words(zero_EN.T.numpy()),
            "scales": scale_EN.T,
        }
        return Written(tensors, (fields_ED - zero_ED) * scale_ED)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return Format(write, config | {"zero_point": True}, dtype=torch.float16)


def fp8(block: tuple[int, int] | None) -> Format:
    """As DeepSeek-V3 and Qwen3-FP8: float8 with a scale for each block, or for the weight."""

    def write(weight_ED: Tensor) -> Written:
        rows, columns = block or weight_ED.shape
        stored_ED = torch.empty(weight_ED.shape, dtype=torch.float8_e4m3fn)
        numbers_ED = torch.empty_like(weight_ED)
        scales = torch.empty(-(-weight_ED.shape[0] // rows), -(-weight_ED.shape[1] // columns))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = weight_ED[part].abs().max() / 448
                stored_ED[part] = (weight_ED[part] / scales[i, j]).to(torch.float8_e4m3fn)
                numbers_ED[part] = stored_ED[part].float() * scales[i, j]
        if block is None:
            tensors = {"weight": stored_ED, "weight_scale": scales.reshape(())}
            return Written(tensors | {"input_scale": torch.tensor(0.5)}, numbers_ED)
        return Written({"weight": stored_ED, "weight_scale_inv": scales}, numbers_ED)

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    config |= {"weight_block_size": list(block)} if block else {}
    return Format(write, config)
