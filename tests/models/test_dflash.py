"""DFlash and DSpark drafters against whole texts without a cache, and what is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outdraft.core.draft import STATE_WINDOW, DraftSource
from outdraft.core.errors import ConfigError
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.drafting.device.asks import DraftModelAsk, StateWindow
from outdraft.drafting.device.block_drafter import BlockDrafter, num_spare_blocks
from outdraft.kernels.draft_ops import Frontier
from outdraft.kernels.torch.table import reference_kernels
from outdraft.kv.cache import KVCache
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.loader import load_model
from outdraft.models.drafters.dflash import DFlashNetwork, load_dflash
from outdraft.models.drafters.tables import TargetTables
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import TINY
from tests.models.head_checkpoints import tiny_target
from tests.oracle.heads import BLOCK_SIZE, random_head
from tests.reference import dflash as reference

VOCAB, SLOTS, NUM_BLOCKS = TINY["vocab_size"], 4, 24
LENGTHS = (13, 30)

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def _unchanged(config: dict[str, Any], tensors: dict[str, Tensor]) -> None: ...


def _sliding(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def _all_sliding(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}


def _sliding_both_ways(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    _all_sliding(config, tensors)
    config |= {"is_causal": False}


def _as_deepspec(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """One flat object; the file has tables of its own."""
    config |= config.pop("dflash_config")
    config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}
    config |= {"enable_confidence_head": False}
    generator = torch.Generator().manual_seed(9)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(VOCAB, TINY["hidden_size"], generator=generator)


LAYOUTS: dict[str, tuple[str, Change]] = {
    "dflash": ("dflash", _unchanged),
    "sliding": ("dflash", _sliding),
    "all-sliding": ("dflash", _all_sliding),
    "sliding-both-ways": ("dflash", _sliding_both_ways),
    "deepspec": ("dflash", _as_deepspec),
    "dspark": ("dspark", _unchanged),
}


def written(folder: Path, kind: str, change: Change = _unchanged) -> Path:
    """A drafter of the tiny target in `folder`."""
    path = random_head(kind, folder / "target", folder / "drafter")
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    change(config, tensors)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def settings_of(network: DFlashNetwork) -> reference.Settings:
    layer = network.config.layer
    return reference.Settings(
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_size,
        layer.rope.theta,
        layer.rms_norm_eps,
        network.config.block_size,
        network.config.mask_token_id,
        layer.windows,
        network.config.is_causal,
    )


class Drive:
    """A drafter of two texts, and what the target may have computed over them."""

    def __init__(self, network: DFlashNetwork, max_rows: int = 64) -> None:
        spare = num_spare_blocks(network.config.block_size, SLOTS)
        sizes = NUM_BLOCKS + 2 * spare, SLOTS, network.dtype, network.device
        cache = KVCache(network.shard.cache_shapes, *sizes)
        size, device = network.feature_size, network.device
        self.window = StateWindow(2, size, network.dtype, device, STATE_WINDOW)
        source = DraftSource(str(network.config.kind))
        self.drafter = BlockDrafter(network, cache, max_rows, source, self.window)
        self.network, self.num_read = network, [0, 0]
        generator = torch.Generator().manual_seed(1)
        self.ids_SL = torch.randint(0, VOCAB, (2, 60), generator=generator)
        size = TINY["hidden_size"]
        self.tapped = torch.randn(2, 60, len(network.taps), size, generator=generator).double()
        self.blocks = torch.randperm(NUM_BLOCKS, generator=generator).view(2, -1)
        for row in range(2):
            features = network.features(self.tapped[row].to(network.dtype))
            self.window.features_NF[self.window.places(row, 0, 60)] = features

    def levels(
        self, lengths: tuple[int, ...], num_drafts: int, shares: RequestShares = ALL_HERE
    ) -> Any:
        """Behind the first so many tokens of each text."""
        asks: list[DraftModelAsk] = []
        for row, length in enumerate(lengths):
            count = -(-(length + num_drafts) // SLOTS)
            blocks = self.blocks[row, :count].tolist()
            asks.append(DraftModelAsk(row, length, self.num_read[row], num_drafts, blocks))
            self.num_read[row] = length - 1
        unread = self.drafter.unread(asks, self.ids_SL)
        return self.drafter.levels(asks, unread, num_drafts, shares)

    def expected(self, weights: dict[str, Tensor], row: int, length: int) -> Tensor:
        """[R, D]."""
        tapped = [*self.tapped[row, : length - 1].unbind(1)]
        newest = int(self.ids_SL[row, length - 1])
        return reference.block_states(weights, settings_of(self.network), tapped, newest)


def weights_of(path: Path, target: CausalLM) -> dict[str, Tensor]:
    stored = {
        name: tensor.double() for name, tensor in load_file(path / "model.safetensors").items()
    }
    table = load_file(path.parent / "target" / "model.safetensors")
    head = table.get("lm_head.weight", table["model.embed_tokens.weight"])
    own = {"embed_tokens.weight": table["model.embed_tokens.weight"], "lm_head.weight": head}
    return {name: tensor.double() for name, tensor in (own | stored).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("is_native", [False, True])
def test_a_block_equals_whole_texts(tmp_path: Path, name: str, is_native: bool):
    dtype = torch.float32 if is_native else torch.float64
    kernels = cpu_kernels() if is_native else reference_kernels()
    tiny_target(tmp_path)
    target = load_model(tmp_path / "target", dtype, "cpu", kernels)
    kind, change = LAYOUTS[name]
    path = written(tmp_path, kind, change)
    network = load_dflash(path, TargetTables(target))
    drive, weights = Drive(network), weights_of(path, target)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if is_native else {"rtol": 1e-9, "atol": 1e-9}
    first = 0 if network.config.drafts_from_anchor else 1
    for lengths, num_drafts in ((LENGTHS, 2), ((16, 31), network.config.num_drafts)):
        levels = drive.levels(lengths, num_drafts)
        tokens_B1 = torch.tensor([[3], [5]])
        for depth in range(num_drafts):
            frontier = Frontier(tokens_B1, tokens_B1 * 0, tokens_B1, depth, depth - 1)
            logits_BV = levels.next_logits(frontier)[:, 0] if depth else levels.first_logits()
            for row, length in enumerate(lengths):
                state = drive.expected(weights, row, length)[first + depth]
                wanted_N = weights["lm_head.weight"] @ state
                if network.config.markov_rank:
                    before = int(tokens_B1[row]) if depth else int(drive.ids_SL[row, length - 1])
                    wanted_N = wanted_N + reference.pair_logits(weights, before)
                wanted_V = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
                ids_N = torch.arange(len(wanted_N)) + weights.get("d2t", torch.zeros(1)).long()
                wanted_V[ids_N] = wanted_N
                torch.testing.assert_close(logits_BV[row].double(), wanted_V, **tolerance)


def test_requests_that_share_no_pass_get_the_same_blocks(tmp_path: Path):
    target = tiny_target(tmp_path)
    network = load_dflash(written(tmp_path, "dflash"), TargetTables(target))
    together = Drive(network).levels(LENGTHS, 4).first_logits()
    apart = Drive(network, max_rows=BLOCK_SIZE).levels(LENGTHS, 4).first_logits()
    torch.testing.assert_close(apart, together, rtol=1e-12, atol=1e-12)


def test_confidence_reads_a_draft_and_the_token_before_it(tmp_path: Path):
    target = tiny_target(tmp_path)
    path = written(tmp_path, "dspark")
    network, weights = load_dflash(path, TargetTables(target)), weights_of(path, target)
    assert network.heads is not None
    states_RD = torch.randn(3, TINY["hidden_size"], generator=torch.manual_seed(2)).double()
    found = network.heads.confidences(states_RD, torch.tensor([4, 9, 0]))
    wanted = [
        reference.confidence(weights, state, token)
        for state, token in zip(states_RD, (4, 9, 0), strict=True)
    ]
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_tables_that_are_the_targets_are_not_kept_twice(tmp_path: Path):
    target = tiny_target(tmp_path)
    table = load_file(tmp_path / "target" / "model.safetensors")["model.embed_tokens.weight"]

    def with_copy(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["embed_tokens.weight"] = table

    network = load_dflash(written(tmp_path, "dflash", with_copy), TargetTables(target))
    assert network.embed_tokens is None
    assert network.lm_head is None


def _set(**changes: Any) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config |= changes

    return change


REFUSED: dict[str, tuple[str, Change, str]] = {
    "another network": ("dflash", _set(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel"),
    "no mask": ("dflash", _set(dflash_config={"target_layer_ids": [0, 1]}), "mask_token_id"),
    "no taps": ("dflash", _set(dflash_config={"mask_token_id": 0}), "target_layer_ids"),
    "a layer that is not there": (
        "dflash",
        _set(dflash_config={"mask_token_id": 0, "target_layer_ids": [0, 7]}),
        "behind layers [1, 8], but the target has 3 layers",
    ),
    "too long a block": ("dflash", _set(block_size=64), "block_size must be from 2 to 63"),
    "a short window": (
        "dflash",
        _set(layer_types=["sliding_attention"] * 2, sliding_window=4),
        "sliding_window 4 is shorter than a block of 5",
    ),
    "another pair head": ("dspark", _set(markov_head_type="gated"), "markov_head_type 'gated'"),
    "another correction": ("dspark", _set(enable_correction_head=True), "enable_correction_head"),
    "scaled embeddings": ("dflash", _set(input_embedding_scale=2.0), "input_embedding_scale"),
    "another vocabulary": ("dflash", _set(vocab_size=99), "knows 99 tokens, but the target 61"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_by_name(tmp_path: Path, name: str):
    target = tiny_target(tmp_path)
    kind, change, words = REFUSED[name]
    path = written(tmp_path, kind, change)
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_dflash(path, TargetTables(target))
