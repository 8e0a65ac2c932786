"""EAGLE drafters against whole sequences without a cache, and the checkpoints that are refused."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.core.errors import ConfigError
from outdraft.kernels.torch.table import reference_kernels
from outdraft.kv.cache import KVCache
from outdraft.models.base import StateNetwork
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.drafters.eagle import EagleNetwork, load_eagle
from outdraft.models.drafters.tables import TargetTables
from tests.attention.causal import causal_metadata
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import are_bfloat16
from tests.models.eagle_checkpoints import (
    LAYOUTS,
    TARGET_LAYERS,
    TARGET_SIZE,
    VOCABULARY,
    Layout,
    random_target,
)
from tests.reference import eagle as reference

NUM_TOKENS, NUM_STEPS = 29, 4
CHUNKS = [1, 9, 2, 1, 16]
BLOCK_SIZE, NUM_BLOCKS = 4, 12


class Drive:
    """A drafter that reads one text, or continues it, over blocks of a cache in no order."""

    def __init__(self, network: StateNetwork) -> None:
        self.network, self.num_read = network, 0
        sizes = (NUM_BLOCKS, BLOCK_SIZE, network.dtype, network.device)
        self.cache = KVCache(network.shard.cache_shapes, *sizes)
        generator = torch.Generator().manual_seed(1)
        self.table_P = torch.randperm(NUM_BLOCKS, generator=generator).to(torch.int32)

    def metadata(self, num_rows: int) -> AttentionMetadata:
        positions_T = torch.arange(self.num_read, self.num_read + num_rows)
        slots_T = self.table_P[positions_T // BLOCK_SIZE].long() * BLOCK_SIZE
        slots_T, table_P = slots_T + positions_T % BLOCK_SIZE, self.table_P
        device = self.network.device
        return causal_metadata(self.num_read, num_rows, slots_T.to(device), table_P.to(device))

    def read(self, token_ids_T: Tensor, states_TF: Tensor) -> Tensor:
        metadata = self.metadata(len(token_ids_T))
        self.num_read += len(token_ids_T)
        device, dtype = self.network.device, self.network.dtype
        states_TF = states_TF.to(device, dtype)
        return self.network(token_ids_T.to(device), states_TF, self.cache.layers, metadata)

    def read_chunks(self, token_ids_T: Tensor, states_TF: Tensor, sizes: list[int]) -> Tensor:
        pairs = zip(token_ids_T.split(sizes), states_TF.split(sizes), strict=True)
        return torch.cat([self.read(ids, states) for ids, states in pairs])


def random_pass(num_rows: int, num_taps: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, and what a target may have computed over them."""
    generator = torch.Generator().manual_seed(seed)
    token_ids_T = torch.randint(0, VOCABULARY, (num_rows,), generator=generator)
    states = torch.randn(1 + num_taps, num_rows, TARGET_SIZE, generator=generator).double()
    return token_ids_T, states[0], 2 * states[1:].transpose(0, 1)


def features_of(layout: Layout, target: CausalLM, hidden_TD: Tensor, tapped_TKS: Tensor) -> Tensor:
    """What the reference reads of the target's pass."""
    if not layout.taps:
        return hidden_TD
    weights, options = layout.reference(target)
    return reference.features(weights, options, list(tapped_TKS.unbind(1)))


def load(path: Path, target: CausalLM) -> EagleNetwork:
    return load_eagle(path, TargetTables(target))


def check_against_reference(
    layout: Layout,
    network: EagleNetwork,
    target: CausalLM,
    tolerance: float,
    logits_of: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """A text in chunks, then a greedy chain whose states stand in for the target's; `logits_of`
    states: from all ranks of the network."""
    weights, options = layout.reference(target)
    ids_T, hidden_TD, tapped_TKS = random_pass(NUM_TOKENS, len(layout.taps))
    want_TF = features_of(layout, target, hidden_TD, tapped_TKS)
    kind = {"device": network.device, "dtype": network.dtype}
    got_TF = network.features(hidden_TD.to(**kind), tapped_TKS.to(**kind))
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False, "check_device": False}
    torch.testing.assert_close(got_TF, want_TF, **close)
    drive = Drive(network)
    got_TD = drive.read_chunks(ids_T, got_TF, CHUNKS)
    for _ in range(NUM_STEPS):
        want_TD = reference.states(weights, options, ids_T, want_TF)
        want_TV = reference.logits(weights, options, want_TD)
        torch.testing.assert_close(got_TD, want_TD[-len(got_TD) :], **close)
        got_TV = (logits_of or network.logits)(got_TD)
        torch.testing.assert_close(got_TV, want_TV[-len(got_TD) :], **close)
        best_T = got_TV.argmax(-1).cpu()
        assert torch.equal(best_T, want_TV[-len(got_TD) :].argmax(-1))
        ids_T = torch.cat([ids_T, best_T[-1:]])
        want_TF = torch.cat([want_TF, want_TD[-1:]])
        got_TD = drive.read(best_T[-1:], got_TD[-1:])


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return random_target(reference_kernels())


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_texts_and_drafts_equal_those_of_whole_sequences(
    name: str, tmp_path: Path, target: CausalLM
):
    layout = LAYOUTS[name]

    network = load(layout.save(tmp_path), target)

    assert network.taps == layout.taps
    check_against_reference(layout, network, target, 1e-9)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_packed_drafter_on_the_cpu_computes_the_same(name: str, tmp_path: Path):
    layout, target = LAYOUTS[name], random_target(cpu_kernels(), torch.float32)

    network = load(layout.save(tmp_path), target)

    assert are_bfloat16(network)
    check_against_reference(layout, network, random_target(reference_kernels()), 1e-4)


def test_the_head_of_a_packed_target_serves(tmp_path: Path):
    layout = LAYOUTS["eagle3-nothing-own"]
    target = random_target(cpu_kernels(), torch.float32)
    plain = random_target(reference_kernels())

    network = load(layout.save(tmp_path), target)

    assert target.lm_head.weight is None
    check_against_reference(layout, network, plain, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_drafts_on_a_gpu_equal_those_of_whole_sequences(name: str, tmp_path: Path):
    layout, target = LAYOUTS[name], random_target(reference_kernels(), device="cuda")

    check_against_reference(layout, load(layout.save(tmp_path), target), target, 1e-8)


@pytest.mark.parametrize("option", ["norm_output", "norm_before_residual"])
def test_an_option_that_is_left_out_would_show(option: str, tmp_path: Path, target: CausalLM):
    layout = LAYOUTS["eagle3-norm-output"]
    other = replace(layout, config=layout.config | {"norm_output": False, option: True})
    if option == "norm_output":
        other = replace(layout, config=layout.config | {option: False})

    with pytest.raises(AssertionError, match="not close"):
        check_against_reference(layout, load(other.save(tmp_path), target), target, 1e-3)


@pytest.fixture(scope="module", params=["eagle-two-layers", "eagle3.1", "p-eagle"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, target):
    return load(LAYOUTS[request.param].save(tmp_path_factory.mktemp(request.param)), target)


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_chunking_does_not_change_states(network: EagleNetwork, sizes: list[int]):
    ids_T, hidden_TD, tapped_TKS = random_pass(sum(sizes), len(network.taps))
    states_TF = network.features(hidden_TD, tapped_TKS)

    whole_TD = Drive(network).read(ids_T, states_TF)

    parts_TD = Drive(network).read_chunks(ids_T, states_TF, sizes)
    torch.testing.assert_close(parts_TD, whole_TD, rtol=1e-10, atol=1e-10)


def test_states_that_are_read_are_left_as_they_are(network: EagleNetwork):
    ids_T, hidden_TD, tapped_TKS = random_pass(7, len(network.taps))
    states_TF = network.features(hidden_TD, tapped_TKS)
    before_TF = states_TF.clone()

    Drive(network).read(ids_T, states_TF)

    assert torch.equal(states_TF, before_TF)


def test_siblings_in_one_level_of_a_tree_are_separate_chains(network: EagleNetwork):
    ids_T, hidden_TD, tapped_TKS = random_pass(10, len(network.taps))
    states_TF = network.features(hidden_TD, tapped_TKS)
    children_2 = torch.tensor([5, 44])
    chains, tree = [], Drive(network)
    for child in children_2:
        chain = Drive(network)
        root_D = chain.read(ids_T, states_TF)[-1:]
        first_D = chain.read(child[None], root_D)
        chains.append((first_D, chain.read(child[None] + 1, first_D)))

    root_D = tree.read(ids_T, states_TF)[-1:]
    levels = [root_D.expand(2, -1)]
    for depth, masks in enumerate(([0b01, 0b10], [0b0101, 0b1010])):
        metadata = replace(
            tree.metadata(2),
            context_lens_B=torch.tensor([10], dtype=torch.int32),
            num_causal_B=torch.tensor([0], dtype=torch.int32),
            ancestors_T=torch.tensor(masks),
            positions_T=torch.full((2,), 10 + depth),
        )
        levels.append(network(children_2 + depth, levels[-1], tree.cache.layers, metadata))
        tree.num_read += 2

    for depth in range(2):
        want_TD = torch.cat([chain[depth] for chain in chains])
        torch.testing.assert_close(levels[depth + 1], want_TD, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name, x in LAYOUTS.items() if x.mask_shape])
def test_the_mask_stands_in_for_states_not_known_yet(name: str, tmp_path: Path, target: CausalLM):
    layout = LAYOUTS[name]
    network = load(layout.save(tmp_path), target)
    weights, options = layout.reference(target)
    ids_T, hidden_TD, tapped_TKS = random_pass(9, len(layout.taps))
    mask = weights["mask_hidden"].reshape(1, -1)
    is_wide = mask.shape[1] == 3 * TARGET_SIZE
    want_1D = reference.features(weights, options, list(mask.chunk(3, 1))) if is_wide else mask
    want_TF = features_of(layout, target, hidden_TD, tapped_TKS)
    masked_ids_T = torch.cat([ids_T, torch.full((3,), 60)])
    want_TD = reference.states(weights, options, masked_ids_T, torch.cat([want_TF, *[want_1D] * 3]))

    assert network.has_mask_state
    assert network.config.mask_token_id == 60
    state_D = network.mask_state()
    states_TF = torch.cat([network.features(hidden_TD, tapped_TKS), state_D.expand(3, -1)])
    got_TD = Drive(network).read(masked_ids_T, states_TF)

    torch.testing.assert_close(got_TD, want_TD, rtol=1e-9, atol=1e-9)


def test_shards_and_old_rotary_frequencies_and_copies_for_training_are_read_over(
    tmp_path: Path, target: CausalLM
):
    layout = LAYOUTS["eagle3-speculators"]
    path = layout.save(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["verifier_lm_head.weight"] = torch.ones(2, 2)
    names = sorted(tensors)
    files = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))

    check_against_reference(layout, load(path, target), target, 1e-9)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3-nothing-own", "p-eagle"])
def test_bytes_are_those_of_the_file_and_of_what_one_step_reads(
    name: str, tmp_path: Path, target: CausalLM
):
    tensors = load_file(LAYOUTS[name].save(tmp_path) / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    network = load(tmp_path, target)
    once = ["fc.weight"] if network.taps else []
    unread = [tensors[x] for x in [*once, "embed_tokens.weight", "mask_hidden"] if x in tensors]
    head_bytes = 0 if "lm_head.weight" in tensors else VOCABULARY * TARGET_SIZE * 8

    own_bytes = sum(tensor.nbytes for tensor in tensors.values())

    assert network.memory_bytes == own_bytes
    assert network.weight_bytes == own_bytes - sum(x.nbytes for x in unread) + head_bytes


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


Q_PROJ = "midlayer.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q_PROJ), "lacks tensors: layers.0.self_attn.q_proj.weight"),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "lacks tensors: layers.0.hidden_norm"),
        (lambda t: t.pop("lm_head.weight"), "lacks tensors: lm_head.weight"),
        (lambda t: t.pop("d2t"), "lacks tensors: d2t"),
        (lambda t: t.update({"extra": torch.ones(2)}), "no use for: extra"),
        (lambda t: t.update({"layers.0.mlp.up_proj.weight": torch.ones(2)}), "twice: layers.0.mlp"),
        (lambda t: t.update({"fc_norm.0.weight": torch.ones(32)}), "no use for: fc_norm.0.weight"),
        (
            lambda t: t.update({Q_PROJ: torch.ones(32, 32)}),
            f"'{Q_PROJ}' has shape [32, 32], but config.json asks for [32, 64]",
        ),
        (
            lambda t: t.update({"fc.weight": torch.ones(32, 64)}),
            "'fc.weight' has shape [32, 64], but config.json asks for [32, 96]",
        ),
        (
            lambda t: t.update({"mask_hidden": torch.ones(1, 7)}),
            "'mask_hidden' has shape [1, 7], but config.json asks for 96 numbers",
        ),
        (lambda t: t["d2t"].add_(50), "'d2t' leads out of the vocabulary of 61 tokens"),
        (lambda t: t["d2t"].neg_(), "'d2t' leads out of the vocabulary"),
        (lambda t: t["d2t"].copy_(-torch.arange(17)), "'d2t' maps several draft tokens to one"),
        (lambda t: t["t2d"].logical_not_(), "'t2d' and 'd2t' contradict each other"),
        (lambda t: t.update({"d2t": torch.zeros(17)}), "'d2t' is [17] of torch.float32"),
        (lambda t: t.update({"t2d": torch.ones(3).bool()}), "'t2d' is [3] of torch.bool"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, target: CausalLM, change, message: str):
    path = LAYOUTS["eagle3"].save(tmp_path)
    rewrite(path, change)

    with pytest.raises(ConfigError, match=re.escape(message)):
        load(path, target)


def test_an_embedding_that_is_the_target_s_is_not_kept_twice(tmp_path: Path, target: CausalLM):
    path = LAYOUTS["p-eagle"].save(tmp_path)
    table_VD = target.embed_tokens.source
    changed_VD = table_VD.clone()
    changed_VD[60] += 1

    rewrite(path, lambda tensors: tensors.update({"embed_tokens.weight": table_VD}))
    same = load(path, target)
    rewrite(path, lambda tensors: tensors.update({"embed_tokens.weight": changed_VD}))
    changed = load(path, target)

    assert same.embed_tokens is None
    assert changed.memory_bytes == same.memory_bytes + table_VD.nbytes


def test_a_vocabulary_mapping_needs_no_reverse(tmp_path: Path, target: CausalLM):
    layout = LAYOUTS["eagle3"]
    path = layout.save(tmp_path)
    rewrite(path, lambda tensors: tensors.pop("t2d"))

    check_against_reference(layout, load(path, target), target, 1e-9)


def test_pickles_are_refused(tmp_path: Path, target: CausalLM):
    path = LAYOUTS["eagle3"].save(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")

    with pytest.raises(ConfigError, match="pickled weights only"):
        load(path, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "reads states of size 32, but the target's hidden size is 64"),
        ({"vocab_size": 80}, "knows 61 tokens, but the target 80"),
        ({"num_hidden_layers": 5}, "behind layers [1, 4, 6], but the target has 5 layers"),
    ],
)
def test_a_target_that_does_not_fit_is_refused(tmp_path: Path, changes, message: str):
    path = LAYOUTS["eagle3-specforge"].save(tmp_path)
    target = random_target(reference_kernels(), **changes)

    with pytest.raises(ConfigError, match=re.escape(message)):
        load(path, target)


def test_a_narrow_drafter_needs_its_own_embedding_and_head(tmp_path: Path, target: CausalLM):
    path = LAYOUTS["eagle3-specforge"].save(tmp_path)
    rewrite(path, lambda tensors: tensors.pop("embed_tokens.weight"))

    with pytest.raises(ConfigError, match="has a hidden size of 24"):
        load(path, target)


def test_taps_are_counted_from_the_embedding_to_the_last_layer(tmp_path: Path, target: CausalLM):
    layout = LAYOUTS["eagle3-nothing-own"]
    taps = [0, 3, TARGET_LAYERS]
    config = layout.config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": taps}}

    network = load(replace(layout, config=config).save(tmp_path), target)

    assert network.taps == (0, 3, TARGET_LAYERS)
