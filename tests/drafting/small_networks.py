"""Tiny random networks that draft, with compiled passes, and caches for them."""

from pathlib import Path

import torch

from outdraft.drafting.device.draft_network import (
    DraftNetwork,
    EagleDraftNetwork,
    LanguageModelNetwork,
)
from outdraft.kv.cache import KVCache
from outdraft.kv.feature_cache import FeatureCache
from outdraft.models.eagle_loader import load_eagle
from tests.kernels.tables import cpu_kernels
from tests.models.eagle_checkpoints import LAYOUTS, random_target

CPU = torch.device("cpu")
KINDS = ["language model", "eagle", "eagle3", "eagle3.1"]
BLOCK_SIZE = 4


def small_network(kind: str, num_blocks: int, folder: Path) -> tuple[DraftNetwork, KVCache]:
    """One of KINDS; the target's states are random. `folder`: for its checkpoint."""
    kernels = cpu_kernels()
    target = random_target(kernels, torch.float32)
    if kind == "language model":
        shape, drafting = target.config, LanguageModelNetwork(target)
    else:
        shape = load_eagle(LAYOUTS[kind].save(folder), target, kernels)
        features = FeatureCache(num_blocks, BLOCK_SIZE, shape.feature_size, torch.float32, CPU)
        generator = torch.Generator().manual_seed(4)
        slots_T = torch.arange(num_blocks * BLOCK_SIZE)
        features.write(torch.randn(len(slots_T), shape.feature_size, generator=generator), slots_T)
        drafting = EagleDraftNetwork(shape, features)
    sizes = (shape.num_kv_heads, shape.head_size, torch.float32, CPU)
    return drafting, KVCache(shape.num_layers, num_blocks, BLOCK_SIZE, *sizes)
