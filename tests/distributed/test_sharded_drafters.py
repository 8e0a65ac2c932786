"""Drafters that are spread over some of their target's ranks against the same drafters on one."""

import json
from collections.abc import Callable, Hashable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import RankGroup, Ranks
from outdraft.drafting.device.network_drafter import DraftNetwork
from outdraft.drafting.device.translated_model import TranslatedModel
from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.draft_ops import Frontier
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.loader import load_model
from outdraft.models.drafters.dflash import DFlashNetwork, load_dflash
from outdraft.models.drafters.eagle import EagleNetwork, load_eagle
from outdraft.models.drafters.medusa import MedusaHeads, load_medusa
from outdraft.models.drafters.mlp_speculator import load_mlp_speculator
from outdraft.models.drafters.tables import TargetTables
from tests.drafting.device.test_translated_model import random_map
from tests.models.checkpoints import (
    TINY,
    VARIANTS,
    chunked_logits,
    random_tokens,
    randomised,
    save,
)
from tests.models.eagle_checkpoints import LAYOUTS, random_target, save_random_target
from tests.models.head_checkpoints import (
    medusa_config,
    medusa_tensors,
    mlp_config,
    mlp_tensors,
    random_hidden,
    write,
)
from tests.models.test_dflash import Drive as BlockDrive
from tests.models.test_eagle import Drive, check_against_reference
from tests.oracle.heads import random_head
from tests.pairwise import rows
from tests.ranks import equal_shares, on_ranks

CPU = torch.device("cpu")
SLOW = pytest.mark.slow
SIZES = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
BLOCKS = ["dflash", "dspark"]
TOLERANCES = {"reference": 1e-10, "auto": 1e-5}
VOCAB, HIDDEN, LAYERS = TINY["vocab_size"], TINY["hidden_size"], TINY["num_hidden_layers"]
TARGETS = {"untied": False, "tied": True}  # whether the head is the embedding


def slow_on_four(cases: list[Any]) -> list[Any]:
    """`cases` that end in the sizes of groups, with the marker where those are large."""
    return [
        pytest.param(*one.values, id=one.id, marks=[*one.marks, SLOW])
        if one.values[-2] == 4
        else one
        for one in cases
    ]


over_ranks = pytest.mark.parametrize(
    ("size", "draft_size"), slow_on_four([pytest.param(*sizes) for sizes in SIZES])
)


def with_ranks(names: str, *values: Iterable[Hashable]) -> pytest.MarkDecorator:
    """A pairwise cover of the values of these names and of the sizes of groups."""
    every = [(*row[:-1], *row[-1]) for row in product(*values, SIZES)]
    found = slow_on_four(rows(every, lambda *row: (*row[:-2], row[-2:])))
    return pytest.mark.parametrize(f"{names},size,draft_size", found)


def load(path: Path, group: RankGroup, *, drafts: bool = False, **options: Any) -> CausalLM:
    kernels = choose_kernels("reference", CPU, torch.float64)
    return load_model(path, torch.float64, CPU, kernels, group=group, drafts=drafts, **options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(randomised(VARIANTS["llama-biases"]()), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def eagle_targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The targets of EAGLE's tests, as checkpoints."""
    folder = tmp_path_factory.mktemp("targets")
    return {
        name: save_random_target(folder / name, tie_word_embeddings=is_tied)
        for name, is_tied in TARGETS.items()
    }


@pytest.fixture(params=TARGETS)
def eagle_target(request: pytest.FixtureRequest, eagle_targets: dict[str, Path]) -> Path:
    return eagle_targets[request.param]


def sent(group: RankGroup) -> tuple[dict[str, int], dict[str, int]]:
    """Calls and bytes since this was called last."""
    found = dict(group.calls), dict(group.sent_bytes)
    group.calls.clear()
    group.sent_bytes.clear()
    return found


def of_groups(parts: list[Tensor], draft_size: int, dim: int = 0) -> list[Tensor]:
    """What the ranks of each draft group have together."""
    return [
        torch.cat(parts[first : first + draft_size], dim)
        for first in range(0, len(parts), draft_size)
    ]


@over_ranks
def test_the_ranks_of_a_draft_model_have_the_logits_of_one_each_some_rows(
    size: int, draft_size: int, checkpoint: Path
):
    ids_T, num_rows = random_tokens(40), 40
    want_TV = chunked_logits(load(checkpoint, Ranks().draft), ids_T, [num_rows])

    def logits(ranks: Ranks) -> Tensor:
        model = load(checkpoint, ranks.draft, drafts=True)
        shares, network = equal_shares(ranks.draft, num_rows), DraftNetwork(model)
        found_QV = chunked_logits(
            model, ids_T, [num_rows], logits_of=lambda states: network.logits(states, shares)
        )
        sums, others, width = 2 * LAYERS + 1, draft_size - 1, -(-VOCAB // draft_size)
        counts = (
            {"sum": sums, "turn": 1},
            {
                "sum": others * sums * num_rows * HIDDEN * 8,
                "turn": (num_rows - len(found_QV)) * width * 8,
            },
        )
        assert sent(ranks.draft) == (counts if draft_size > 1 else ({}, {}))
        assert sent(ranks.target) == ({}, {})
        best_T, _ = model.checked_best_tokens(torch.zeros(2, HIDDEN).double())
        assert best_T.tolist() == [0, 0]  # of equal ones the first
        assert found_QV.is_contiguous()
        return found_QV

    for got_TV in of_groups(on_ranks(size, draft_size, logits), draft_size):
        assert (got_TV - want_TV).abs().max() <= 1e-10
        assert torch.equal(got_TV.argmax(-1), want_TV.argmax(-1))


@over_ranks
def test_a_draft_model_of_another_vocabulary_is_spread_as_well(
    size: int, draft_size: int, checkpoint: Path
):
    vocabulary = random_map(90, VOCAB, 40)
    is_shared_V = vocabulary.is_shared_V
    ids_T = torch.arange(0, 90, 3)

    def logits(ranks: Ranks) -> Tensor:
        model = load(checkpoint, ranks.draft, drafts=True)
        translated: Any = TranslatedModel(model, vocabulary)
        assert translated.shard.num_kv_heads == model.shard.num_kv_heads
        shares = equal_shares(ranks.draft, len(ids_T))
        return chunked_logits(
            translated,
            ids_T,
            [len(ids_T)],
            logits_of=lambda states: translated.logits(states, shares),
        )

    want_TV = logits(Ranks())
    assert (want_TV.isfinite() == is_shared_V).all()
    for got_TV in of_groups(on_ranks(size, draft_size, logits), draft_size):
        assert (got_TV - want_TV)[:, is_shared_V].abs().max() <= 1e-10
        assert (got_TV.isfinite() == is_shared_V).all()


# Nothing of its own, all of it, two layers, biases, a reduced vocabulary, another width.
EAGLES = ["eagle", "eagle-two-layers", "eagle-qkv-bias", "eagle-speculators"]
EAGLES += ["eagle3", "eagle3-nothing-own", "eagle3-specforge"]


@pytest.mark.few(14)
@with_ranks("name,target", EAGLES, TARGETS)
def test_eagle_drafts_as_on_one_rank(
    name: str,
    target: str,
    size: int,
    draft_size: int,
    eagle_targets: dict[str, Path],
    tmp_path: Path,
):
    layout, eagle_target = LAYOUTS[name], eagle_targets[target]
    layout.save(tmp_path)
    kernels = choose_kernels("reference", CPU, torch.float64)
    whole = random_target(kernels, tie_word_embeddings=TARGETS[target])
    num_bytes = load_eagle(tmp_path, TargetTables(whole)).memory_bytes

    def draft(ranks: Ranks) -> int:
        network = spread_eagle(tmp_path, eagle_target, ranks)

        def logits_of(states_RD: Tensor) -> Tensor:
            shares = equal_shares(ranks.draft, len(states_RD))
            return shares.join(network.logits(states_RD, shares))

        sent(ranks.target)  # of loading
        check_against_reference(layout, network, whole, 1e-9, logits_of)
        assert sent(ranks.target) == ({}, {})
        assert (sent(ranks.draft) == ({}, {})) == (draft_size == 1)
        return network.memory_bytes

    found = on_ranks(size, draft_size, draft)
    borrowed = {"embed_tokens.weight", "lm_head.weight"} - set(layout.parts)
    if draft_size == 1:
        copied = len(borrowed) * VOCAB * HIDDEN * 8
        assert found == [num_bytes + copied] * size
    else:
        assert all(own < num_bytes + VOCAB * HIDDEN * 8 for own in found)


def spread_eagle(
    path: Path, target_path: Path, ranks: Ranks, kernels: str = "reference"
) -> EagleNetwork:
    dtype = torch.float64 if kernels == "reference" else torch.float32
    table = choose_kernels(kernels, CPU, dtype)
    target = load_model(target_path, dtype, CPU, table, group=ranks.target)
    tables = TargetTables(target, ranks.draft, target_path)
    return load_eagle(path, tables)


@pytest.mark.parametrize("name", ["eagle", "eagle3-nothing-own"])
def test_a_whole_eagle_beside_a_spread_target_has_the_bits_of_its_compiled_pass(
    name: str, eagle_target: Path, tmp_path: Path
):
    LAYOUTS[name].save(tmp_path)
    ids_T, states_TD = random_tokens(9), random_hidden(9, torch.float32)

    def logits(ranks: Ranks) -> Tensor:
        network = spread_eagle(tmp_path, eagle_target, ranks, "auto")
        return network.logits(Drive(network).read(ids_T, states_TD))

    want_TV = logits(Ranks())
    assert all(torch.equal(got_TV, want_TV) for got_TV in on_ranks(2, 1, logits))


@over_ranks
def test_a_drafter_of_another_vocabulary_is_refused_on_all_ranks(
    size: int, draft_size: int, eagle_target: Path, tmp_path: Path
):
    layout = LAYOUTS["eagle"]
    tensors = layout.tensors()
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"][:20].clone()
    (tmp_path / "config.json").write_text(json.dumps(layout.config | {"vocab_size": 20}))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="the drafter knows 20 tokens, but the target 61"):
        on_ranks(size, draft_size, lambda ranks: spread_eagle(tmp_path, eagle_target, ranks))


@over_ranks
def test_a_step_of_eagle_costs_what_its_layer_and_its_tables_cost(
    size: int, draft_size: int, eagle_target: Path, tmp_path: Path
):
    """Reading: two sums a layer and one for the embedding; logits: one row of the vocabulary."""
    LAYOUTS["eagle3-nothing-own"].save(tmp_path)
    num_rows = 6

    def traffic(ranks: Ranks) -> None:
        network = spread_eagle(tmp_path, eagle_target, ranks)
        sent(ranks.draft)
        states_TD = Drive(network).read(random_tokens(num_rows), random_hidden(num_rows))
        row_bytes, others = network.shard.hidden_size * 8, draft_size - 1
        read = {"sum": 3}, {"sum": others * 3 * num_rows * row_bytes}
        assert sent(ranks.draft) == (read if others else ({}, {}))
        network.logits(states_TD[-1:], equal_shares(ranks.draft, 1))
        width, is_last = -(-VOCAB // draft_size), ranks.draft.rank == others
        said = {"turn": 1}, {"turn": 0 if is_last else width * 8}
        assert sent(ranks.draft) == (said if others else ({}, {}))

    on_ranks(size, draft_size, traffic)


@over_ranks
def test_an_embedding_that_differs_on_one_rank_only_is_kept_on_all(
    size: int, draft_size: int, eagle_target: Path, tmp_path: Path
):
    layout = LAYOUTS["eagle"]
    table_VD = load(eagle_target, Ranks().target).embed_tokens.source.clone()
    tensors = layout.tensors() | {"embed_tokens.weight": table_VD}
    (tmp_path / "config.json").write_text(json.dumps(layout.config))

    for differs in (False, True):
        table_VD[-1, -1] += differs
        save_file(tensors, tmp_path / "model.safetensors")
        networks = on_ranks(
            size, draft_size, lambda ranks: spread_eagle(tmp_path, eagle_target, ranks)
        )
        assert [one.embed_tokens is not None for one in networks] == [differs] * size


def spread_blocks(
    path: Path, target_path: Path, ranks: Ranks, kernels: str = "reference"
) -> DFlashNetwork:
    dtype = torch.float64 if kernels == "reference" else torch.float32
    table = choose_kernels(kernels, CPU, dtype)
    target = load_model(target_path, dtype, CPU, table, group=ranks.target)
    tables = TargetTables(target, ranks.draft, target_path)
    return load_dflash(path, tables)


@pytest.mark.parametrize("kind", BLOCKS)
def test_what_a_drafter_of_blocks_copies_is_counted_before_it_drafts(
    kind: str, checkpoint: Path, tmp_path: Path
):
    path = random_head(kind, checkpoint, tmp_path / kind)

    def num_bytes(ranks: Ranks) -> int:
        return spread_blocks(path, checkpoint, ranks).memory_bytes

    copied = {"dflash": 2, "dspark": 1}[kind] * VOCAB * HIDDEN * 8  # DSpark has a head of its own
    assert on_ranks(2, 1, num_bytes) == [num_bytes(Ranks()) + copied] * 2


@with_ranks("kernels,kind", TOLERANCES, BLOCKS)
def test_blocks_are_drafted_as_on_one_rank(
    kernels: str,
    kind: str,
    size: int,
    draft_size: int,
    checkpoint: Path,
    tmp_path: Path,
):
    """With a context in the cache, and two blocks of other lengths behind it."""
    path = random_head(kind, checkpoint, tmp_path / kind)
    tokens_B1 = torch.tensor([[3], [5]])

    def logits(ranks: Ranks) -> Tensor:
        network = spread_blocks(path, checkpoint, ranks, kernels)
        drive, found = BlockDrive(network), list[Tensor]()
        sent(ranks.target), sent(ranks.draft)  # of loading
        shares = equal_shares(ranks.draft, 2)
        own_B1 = shares.own(tokens_B1)
        for lengths in ((13, 30), (16, 31)):
            levels = drive.levels(lengths, 3, shares)
            found.append(levels.first_logits())
            for depth in (1, 2):
                frontier = Frontier(own_B1, own_B1 * 0, own_B1, depth, depth - 1)
                found.append(levels.next_logits(frontier)[:, 0])
        assert sent(ranks.target) == ({}, {})
        # Two blocks send the embedding and two sums a layer; texts are read without any.
        calls = {"sum": 2 * (1 + 2 * 2), "turn": 2}
        assert sent(ranks.draft)[0] == (calls if ranks.draft.size > 1 else {})
        return torch.stack(found)

    want = logits(Ranks())
    is_known = want.isfinite()
    for got in of_groups(on_ranks(size, draft_size, logits), draft_size, dim=1):
        assert torch.equal(got.isfinite(), is_known)
        assert (got - want)[is_known].abs().max() <= TOLERANCES[kernels]


TOKEN_MAP = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:20]


def medusa(folder: Path, kind: str) -> Path:
    tensors = medusa_tensors(known=20 if kind == "cut" else VOCAB)
    config = medusa_config()
    if kind in ("cut", "stored-whole"):
        tensors["token_map"] = TOKEN_MAP
        config |= {"truncated_vocab_size": 20}
    if kind == "targets":
        config |= {"original_lm_head": True}
        tensors = {name: one for name, one in tensors.items() if not name.startswith("lm_heads")}
    return write(folder, config, tensors)


def spread_medusa(path: Path, target_path: Path, ranks: Ranks) -> MedusaHeads:
    target = load(target_path, ranks.target)
    tables = TargetTables(target, ranks.draft, target_path)
    return load_medusa(path, tables)


@over_ranks
@pytest.mark.parametrize("kind", ["own", "targets", "cut", "stored-whole"])
def test_medusa_heads_know_what_they_know_on_one_rank(
    kind: str, size: int, draft_size: int, checkpoint: Path, tmp_path: Path
):
    path, hidden_BD = medusa(tmp_path, kind), random_hidden(5)
    alone = spread_medusa(path, checkpoint, Ranks())
    want_BJV = alone.logits(hidden_BD)
    head_bytes = VOCAB * HIDDEN * 8

    def logits(ranks: Ranks) -> tuple[Tensor, int]:
        heads = spread_medusa(path, checkpoint, ranks)
        found_QJV = heads.logits(hidden_BD, shares=equal_shares(ranks.draft, len(hidden_BD)))
        assert sent(ranks.target) == ({}, {})
        calls, _ = sent(ranks.draft)
        turns = 1 if kind == "targets" else heads.num_heads
        assert calls == ({"turn": turns} if draft_size > 1 else {})
        return found_QJV, heads.memory_bytes

    parts, each_bytes = zip(*on_ranks(size, draft_size, logits), strict=True)
    for got_BJV in of_groups(list(parts), draft_size):
        assert torch.equal(got_BJV.isfinite(), want_BJV.isfinite())
        is_known = want_BJV.isfinite()
        assert (got_BJV[is_known] - want_BJV[is_known]).abs().max() <= 1e-10
    if draft_size == 1:  # a copy of the target's head is counted
        want_bytes = alone.memory_bytes + (head_bytes if kind == "targets" else 0)
        assert each_bytes == (want_bytes,) * size


@over_ranks
@pytest.mark.parametrize("tied", [False, True])
def test_an_mlp_speculator_says_what_it_says_on_one_rank(
    tied: bool, size: int, draft_size: int, checkpoint: Path, tmp_path: Path
):
    path = write(tmp_path, mlp_config(tie_weights=tied), mlp_tensors(tied=tied))

    def logits(ranks: Ranks) -> Tensor:
        target = load(checkpoint, ranks.target)
        tables = TargetTables(target, ranks.draft, checkpoint)
        speculator = load_mlp_speculator(path, tables)
        state_RS, found = speculator.first_state(random_hidden(5)), []
        for head in range(speculator.num_heads):
            state_RS = speculator.step(head, state_RS, random_tokens(5, seed=head))
            found.append(speculator.logits(head, state_RS, equal_shares(ranks.draft, 5)))
        calls, _ = sent(ranks.draft)
        turns = {"turn": speculator.num_heads}
        assert calls == (turns if ranks.draft.size > 1 else {})
        assert sent(ranks.target) == ({}, {})
        return torch.stack(found)

    want = logits(Ranks())
    for got in of_groups(on_ranks(size, draft_size, logits), draft_size, dim=1):
        assert (got - want).abs().max() <= 1e-10


@pytest.mark.parametrize("kept", [None, WeightFormat.INT8])
def test_a_copied_head_keeps_the_number_format_of_the_targets(
    kept: WeightFormat | None, checkpoint: Path, tmp_path: Path
):
    path, hidden_BD = medusa(tmp_path, "targets"), random_hidden(5)

    def logits(ranks: Ranks) -> Tensor:
        target = load(checkpoint, ranks.target, quantization=kept)
        tables = TargetTables(target, ranks.draft, checkpoint)
        return load_medusa(path, tables).logits(hidden_BD)

    want_BJV = logits(Ranks())
    for got_BJV in on_ranks(2, 1, logits):
        assert torch.equal(got_BJV, want_BJV)


def test_ranks_that_do_not_divide_a_drafter_are_refused_by_the_name_of_their_option(
    checkpoint: Path, tmp_path: Path
):
    def refused(make: Callable[[RankGroup], object]) -> None:
        with pytest.raises(ConfigError, match=r"draft_tensor_parallel_size 3 .*: choose 1, 2, 4"):
            on_ranks(3, 3, lambda ranks: make(ranks.draft))

    refused(lambda group: load(checkpoint, group, drafts=True))
    LAYOUTS["eagle"].save(tmp_path)
    whole = load(checkpoint, Ranks().target)
    refused(lambda group: load_eagle(tmp_path, TargetTables(whole, group)))
    blocks = random_head("dflash", checkpoint, tmp_path / "dflash")
    refused(lambda group: load_dflash(blocks, TargetTables(whole, group)))
