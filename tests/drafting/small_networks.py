"""Tiny random networks that draft, with compiled passes, and caches for them."""

from pathlib import Path

import torch

from outdraft.drafting.device.asks import StateWindow
from outdraft.drafting.device.network_drafter import DraftNetwork
from outdraft.kv.cache import KVCache
from outdraft.models.drafters.eagle import load_eagle
from outdraft.models.drafters.tables import TargetTables
from tests.kernels.tables import cpu_kernels
from tests.models.eagle_checkpoints import LAYOUTS, random_target

CPU = torch.device("cpu")
KINDS = ["language model", "eagle", "eagle3", "eagle3.1"]
BLOCK_SIZE = 4


def small_network(kind: str, num_blocks: int, folder: Path) -> tuple[DraftNetwork, KVCache]:
    """One of KINDS. `folder`: for its checkpoint."""
    target = random_target(cpu_kernels(), torch.float32)
    if kind == "language model":
        shapes, drafting = target.config.cache_shapes, DraftNetwork(target)
    else:
        network = load_eagle(LAYOUTS[kind].save(folder), TargetTables(target))
        shapes, drafting = network.shard.cache_shapes, DraftNetwork(network)
    return drafting, KVCache(shapes, num_blocks, BLOCK_SIZE, torch.float32, CPU)


def random_window(
    drafting: DraftNetwork, num_state_rows: int, num_tokens: int
) -> StateWindow | None:
    """Random states of the target's, of texts of at most so many tokens; None: it reads none."""
    if not drafting.feature_size:
        return None
    window = StateWindow(num_state_rows, drafting.feature_size, torch.float32, CPU, num_tokens)
    window.features_NF.normal_(generator=torch.Generator().manual_seed(4))
    return window
