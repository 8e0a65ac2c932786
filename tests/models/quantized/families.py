"""Tiny checkpoints of the transformers library's families in the published formats, and plain twins
with the numbers that those stand for."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from tests.models.families import randomised_family
from tests.models.quantized.writers import Format

# Sizes that groups of 32 and words of eight numbers divide.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64}
_PRODUCTS = re.compile(r"(_proj|_proj_with_mqa|\.w[123])\.weight$")
_MODEL = "model.safetensors"


def save_family(
    name: str, path: Path, stored_as: Format, *, rounds: bool, **changes: Any
) -> PreTrainedModel:
    """Write a checkpoint of the family, and a plain one beside it, which is returned.

    Args:
        rounds: to bfloat16, as what is dequantised.
        changes: of the config's attributes.
    """
    model = randomised_family(name, **SIZES | changes)
    model.to(stored_as.dtype).save_pretrained(path)
    tensors = load_file(path / _MODEL)
    plain = {key: one.float() for key, one in tensors.items()}
    for key in [key for key in tensors if _PRODUCTS.search(key) and tensors[key].dim() == 2]:
        module = key.removesuffix(".weight")
        if any(re.match(one.removeprefix("re:"), module) for one in stored_as.ignored):
            continue
        written = stored_as.write(tensors.pop(key).float())
        tensors |= {f"{module}.{part}": one.contiguous() for part, one in written.tensors.items()}
        numbers_ED = written.numbers_ED.float()
        plain[key] = numbers_ED.bfloat16().float() if rounds else numbers_ED
    return finish(model, path, tensors, plain, stored_as.config)


def save_gpt_oss(path: Path, **changes: Any) -> PreTrainedModel:
    """As OpenAI publishes it: experts in MXFP4, all else in bfloat16."""
    model = randomised_family("gpt-oss", **SIZES | changes)
    model.bfloat16().save_pretrained(path)
    tensors = load_file(path / _MODEL)
    plain = {key: one.float() for key, one in tensors.items()}
    for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "down_proj"))]:
        blocks, scales = mxfp4(tensors.pop(key).float().transpose(1, 2))
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        plain[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return finish(model, path, tensors, plain, {"quant_method": "mxfp4"})


def mxfp4(weight_XED: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks uint8 [X, E, N, 16] and scales uint8 [X, E, N], each number the nearest there is."""
    groups = weight_XED.unflatten(2, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1) / 6)) + 1
    scaled = groups / torch.exp2(exponents)[..., None]
    values = torch.tensor(FP4_VALUES)
    nearest = (scaled[..., None] - values).abs().argmin(-1).to(torch.uint8)
    return nearest[..., ::2] | nearest[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def finish(
    model: PreTrainedModel,
    path: Path,
    tensors: dict[str, Tensor],
    plain: dict[str, Tensor],
    quantization: dict[str, Any],
) -> PreTrainedModel:
    """Write both checkpoints; returns what the library makes of the plain one."""
    save_file(tensors, path / _MODEL)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    twin = path / "plain"
    twin.mkdir()
    (twin / "config.json").write_text(json.dumps(config))
    save_file(plain, twin / _MODEL, metadata={"format": "pt"})
    theirs = type(model).from_pretrained(twin, dtype=torch.float32, attn_implementation="eager")
    theirs.set_experts_implementation("eager")
    return theirs.eval()
