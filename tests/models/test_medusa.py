"""Medusa heads against the slow twin, from every form of checkpoint."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.kernels.ops import Kernels
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.drafters.medusa import MedusaHeads, load_medusa
from outdraft.models.drafters.tables import TargetTables
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import are_bfloat16
from tests.models.head_checkpoints import (
    HIDDEN,
    VOCAB,
    in_original_form,
    medusa_config,
    medusa_tensors,
    random_hidden,
    tiny_target,
    write,
)
from tests.reference import medusa as slow

TOKEN_MAP = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:20]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return tiny_target(tmp_path_factory.mktemp("target"))


def load(
    path: Path,
    target: CausalLM,
    dtype: torch.dtype = torch.float64,
    kernels: Kernels | None = None,
) -> MedusaHeads:
    if dtype is not target.dtype:
        target = tiny_target(path, dtype, kernels=kernels)
    return load_medusa(path, TargetTables(target))


def expected(
    tensors: dict[str, Tensor],
    hidden_BD: Tensor,
    num_heads: int,
    num_layers: int = 1,
    heads: dict[int, Tensor] | None = None,
    scale: float = 1.0,
) -> list[list[np.ndarray]]:
    """[B][J] logits over what each head knows; `heads` are those that are not in the tensors."""
    arrays = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    found = []
    for hidden_D in hidden_BD.double().numpy():
        of_row = []
        for head in range(num_heads):
            blocks = [
                (
                    arrays[f"blocks.{head}.layers.{layer}.weight"],
                    arrays.get(f"blocks.{head}.layers.{layer}.bias"),
                )
                for layer in range(num_layers)
            ]
            weight = arrays.get(f"lm_heads.{head}.weight")
            if weight is None:
                assert heads is not None
                weight = heads[head].double().numpy()
            of_row.append(slow.head_logits(hidden_D, blocks, weight, scale))
        found.append(of_row)
    return found


FORMS: dict[str, dict[str, Any]] = {
    "converted": {},
    "converted-no-bias": {"bias": False},
    "converted-two-layers": {"num_layers": 2},
    "original": {"original": True},
    "original-two-layers": {"original": True, "num_layers": 2},
    "scaled": {"scale": 0.5},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_equal_those_of_the_slow_twin(
    form: str, dtype: torch.dtype, target: CausalLM, tmp_path: Path
):
    options = FORMS[form]
    layers, bias = options.get("num_layers", 1), options.get("bias", True)
    tensors = medusa_tensors(3, layers, bias=bias)
    scale = options.get("scale", 1.0)
    if options.get("original"):
        config = {"medusa_num_heads": 3, "medusa_num_layers": layers, "hidden_act": "silu"}
        named, file = in_original_form(tensors, layers), "medusa_lm_head.safetensors"
    else:
        config = medusa_config(3, layers, medusa_fc_bias=bias, logit_scale=scale)
        named, file = tensors, "model.safetensors"
    heads = load(write(tmp_path, config, named, file), target, dtype)
    hidden_BD = random_hidden(4, dtype)

    got_BJV = heads.logits(hidden_BD)

    want_BJV = torch.tensor(np.array(expected(tensors, hidden_BD, 3, layers, scale=scale)))
    tolerance = 1e-9 if dtype is torch.float64 else 1e-4
    assert got_BJV.dtype is dtype
    assert want_BJV.std() > 0.3  # there is something to get wrong
    torch.testing.assert_close(got_BJV.double(), want_BJV, rtol=tolerance, atol=tolerance)
    assert torch.equal(heads.logits(hidden_BD, range(1, 2)), got_BJV[:, 1:2])


@pytest.mark.parametrize("known", [len(TOKEN_MAP), VOCAB])
def test_a_truncated_vocabulary_is_mapped_to_the_targets(
    known: int, target: CausalLM, tmp_path: Path
):
    """vLLM takes heads of the map's tokens, and cuts heads of all tokens down to them."""
    tensors = medusa_tensors(known=known)
    config = medusa_config(truncated_vocab_size=len(TOKEN_MAP))
    path = write(tmp_path, config, tensors | {"token_map": TOKEN_MAP})
    hidden_BD = random_hidden(4)

    heads = load(path, target)

    found = expected(tensors, hidden_BD, 3)
    cut = [[one if known < VOCAB else one[TOKEN_MAP.numpy()] for one in row] for row in found]
    want_BJV = torch.tensor(
        np.array(
            [
                [slow.over_vocabulary(one, TOKEN_MAP.tolist(), VOCAB, -np.inf) for one in row]
                for row in cut
            ]
        )
    )
    torch.testing.assert_close(heads.logits(hidden_BD), want_BJV, rtol=1e-9, atol=1e-9)


def test_a_map_without_a_truncated_vocabulary_says_nothing(target: CausalLM, tmp_path: Path):
    tensors = medusa_tensors()
    path = write(tmp_path, medusa_config(), tensors | {"token_map": torch.arange(VOCAB).flip(0)})

    heads = load(path, target)

    want = expected(tensors, random_hidden(1), 3)[0]
    torch.testing.assert_close(heads.logits(random_hidden(1))[0], torch.tensor(np.array(want)))


@pytest.mark.parametrize("stored", ["nothing", "lm_head.weight", "lm_heads.0.weight"])
def test_heads_that_are_not_stored_are_the_common_one_or_the_targets(
    stored: str, target: CausalLM, tmp_path: Path
):
    tensors = {n: t for n, t in medusa_tensors().items() if not n.startswith("lm_heads")}
    common = medusa_tensors(seed=9)["lm_heads.0.weight"]
    head = target.lm_head(torch.eye(HIDDEN, dtype=torch.float64)).T
    if stored != "nothing":
        tensors[stored], head = common, common
    path = write(tmp_path, medusa_config(original_lm_head=True), tensors)
    hidden_BD = random_hidden(3)

    heads = load(path, target)

    blocks = {name: tensor for name, tensor in tensors.items() if name.startswith("blocks")}
    want = expected(blocks, hidden_BD, 3, heads=dict.fromkeys(range(3), head))
    torch.testing.assert_close(heads.logits(hidden_BD), torch.tensor(np.array(want)))
    own = sum(t.nbytes * 2 for t in tensors.values())  # float32 on disk, float64 here
    assert heads.memory_bytes == own
    read = sum(t.nbytes * 2 for t in blocks.values()) + VOCAB * HIDDEN * 8  # one read for all
    assert heads.weight_bytes == read


def test_published_configs_that_tell_too_few_heads_are_understood(target: CausalLM, tmp_path: Path):
    tensors = in_original_form(medusa_tensors(4), 1)
    path = write(tmp_path, {"medusa_num_heads": 2, "medusa_num_layers": 1}, tensors)

    assert load(path, target).num_heads == 4


def test_the_prefix_of_some_checkpoints_is_left_out(target: CausalLM, tmp_path: Path):
    tensors = medusa_tensors()
    plain = write(tmp_path / "plain", medusa_config(), tensors)
    prefixed = {f"medusa_heads.{name}": tensor for name, tensor in tensors.items()}
    path = write(tmp_path / "prefixed", medusa_config(), prefixed)

    hidden_BD = random_hidden(2)
    assert torch.equal(load(path, target).logits(hidden_BD), load(plain, target).logits(hidden_BD))


def test_packed_weights_give_the_same_and_are_counted(target: CausalLM, tmp_path: Path):
    tensors = {name: t.bfloat16().float() for name, t in medusa_tensors().items()}
    path = write(tmp_path, medusa_config(), tensors)
    hidden_BD = random_hidden(3, torch.float32)

    heads = load(path, target, torch.float32, cpu_kernels())

    assert are_bfloat16(heads)
    want_BJV = torch.tensor(np.array(expected(tensors, hidden_BD, 3))).float()
    torch.testing.assert_close(heads.logits(hidden_BD), want_BJV, rtol=1e-4, atol=1e-4)
    weights = sum(t.nbytes // (2 if t.dim() == 2 else 1) for t in tensors.values())
    padding = 3 * 16 * HIDDEN * 2  # the rows of a head are a multiple of the kernel's tile
    assert weights <= heads.memory_bytes <= weights + padding
    assert heads.weight_bytes == heads.memory_bytes


Q = "blocks.1.layers.0.weight"


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({}, lambda t: t.pop(Q), f"lacks tensors: {Q}"),
        ({}, lambda t: t.pop("lm_heads.2.weight"), r"lacks tensors: lm_heads\.2\.weight"),
        ({}, lambda t: t.update({"extra": torch.ones(2)}), "no use for: extra"),
        ({"num_heads": 2}, lambda t: None, r"no use for: .*blocks\.2"),
        ({"medusa_fc_bias": False}, lambda t: None, r"no use for: blocks\.0\.layers\.0\.bias"),
        ({}, lambda t: t.update({Q: torch.ones(8, 32)}), rf"'{Q}' has shape \[8, 32\]"),
        ({}, lambda t: t.update({Q: t[Q].to(torch.int8)}), f"'{Q}' has dtype I8"),
        ({"hidden_size": 64}, lambda t: None, "hidden_size=64, the target 32"),
        ({"vocab_size": 64}, lambda t: None, "vocab_size=64, the target 61"),
        ({"num_heads": 0}, lambda t: None, "num_heads must be a positive whole number, got 0"),
        ({"num_heads": None}, lambda t: None, "num_heads is missing"),
        ({"truncated_vocab_size": 20}, lambda t: None, "needs a tensor 'token_map'"),
        (
            {"truncated_vocab_size": 20},
            lambda t: t.update({"token_map": torch.arange(19)}),
            r"'token_map' must hold 20 distinct token ids below 61, got .* of shape \[19\]",
        ),
        (
            {"truncated_vocab_size": 20},
            lambda t: t.update({"token_map": torch.zeros(20, dtype=torch.int64)}),
            "'token_map' must hold 20 distinct",
        ),
        (
            {"truncated_vocab_size": 20},
            lambda t: t.update({"token_map": torch.arange(50, 70)}),
            "ids below 61",
        ),
    ],
)
def test_wrong_checkpoints_are_refused_by_name(
    config: dict[str, Any], change: Any, message: str, target: CausalLM, tmp_path: Path
):
    tensors = medusa_tensors()
    change(tensors)
    path = write(tmp_path, medusa_config(**config), tensors)

    with pytest.raises(ConfigError, match=message):
        load(path, target)


def test_something_else_than_medusa_heads_is_refused(target: CausalLM, tmp_path: Path):
    path = write(tmp_path, {"model_type": "llama", "num_heads": 3}, medusa_tensors())

    with pytest.raises(ConfigError, match="holds no Medusa heads"):
        load(path, target)


def test_pickled_heads_are_refused(target: CausalLM, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3}))
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"anything")

    with pytest.raises(ConfigError, match="pickled weights only"):
        load(tmp_path, target)


@pytest.mark.gpu
def test_logits_on_a_gpu_equal_those_on_a_cpu(target: CausalLM, tmp_path: Path):
    config = medusa_config(truncated_vocab_size=len(TOKEN_MAP))
    tensors = medusa_tensors(known=len(TOKEN_MAP)) | {"token_map": TOKEN_MAP}
    path, hidden_BD = write(tmp_path, config, tensors), random_hidden(4)

    on_gpu = load_medusa(path, TargetTables(tiny_target(tmp_path, device="cuda")))

    want_BJV = load(path, target).logits(hidden_BD)
    torch.testing.assert_close(on_gpu.logits(hidden_BD.cuda()).cpu(), want_BJV)
