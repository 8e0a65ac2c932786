"""The draft heads by name: how one is begun from the target, written and read again."""

import json
from pathlib import Path

import numpy as np
import torch
from dflash import DFlash
from dspark import DSpark
from eagle3 import Eagle3
from medusa import Medusa
from mlp_speculator import MlpSpeculator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

HEADS: dict[str, type[nn.Module]] = {
    "eagle3": Eagle3,
    "medusa": Medusa,
    "mlp_speculator": MlpSpeculator,
    "dflash": DFlash,
    "dspark": DSpark,
}
DRAFT_VOCABULARY_SHARE = 0.985  # of the target's own text


def draft_vocabulary(tokens: np.ndarray, vocab_size: int) -> Tensor:
    """[N] int64, ascending: the fewest tokens that make up DRAFT_VOCABULARY_SHARE of `tokens`."""
    counts = np.bincount(tokens.ravel(), minlength=vocab_size)
    by_count = np.argsort(-counts, kind="stable")
    wanted = DRAFT_VOCABULARY_SHARE * tokens.size
    num_ids = int((counts[by_count].cumsum() < wanted).sum()) + 1
    return torch.from_numpy(np.sort(by_count[:num_ids]))


def new_head(name: str, target: LlamaForCausalLM, own_text: np.ndarray) -> nn.Module:
    """A head to train, begun from the target; `own_text` is what the target writes."""
    if name == "eagle3":
        return Eagle3.from_target(target, draft_vocabulary(own_text, target.config.vocab_size))
    return HEADS[name].from_target(target)


def write_head(head: nn.Module, folder: Path) -> None:
    """config.json and model.safetensors: matrices in bfloat16, vocabulary maps as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in head.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(head.config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def read_head(name: str, folder: Path) -> nn.Module:
    """A head as it is shipped (bf16 values), computing in float32."""
    head = HEADS[name](json.loads((folder / "config.json").read_text(encoding="utf-8")))
    head.load_state_dict(load_file(folder / "model.safetensors"))
    return head.requires_grad_(False).eval()


def head_to_train_on(name: str, folder: Path) -> nn.Module:
    """A trained head of that name, or for "dspark" one of DFlash."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    is_dflash = config["architectures"] == ["DFlashDraftModel"]
    if name == "dspark" and is_dflash:
        return DSpark.from_dflash(read_head("dflash", folder)).requires_grad_(True).train()
    return read_head(name, folder).requires_grad_(True).train()
