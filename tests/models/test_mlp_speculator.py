"""The MLP speculator against the slow twin, from every form of checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.drafters.mlp_speculator import MLPSpeculator, load_mlp_speculator
from outdraft.models.drafters.tables import TargetTables
from tests.models.head_checkpoints import (
    HIDDEN,
    INNER,
    VOCAB,
    mlp_config,
    mlp_tensors,
    random_hidden,
    tiny_target,
    write,
)
from tests.reference import mlp_speculator as slow

TOKENS_BJ = torch.tensor([[3, 60, 0], [7, 7, 7], [11, 2, 59]])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return tiny_target(tmp_path_factory.mktemp("target"))


def load(path: Path, target: CausalLM, dtype: torch.dtype = torch.float64) -> MLPSpeculator:
    if dtype is not target.dtype:
        target = tiny_target(path, dtype)
    return load_mlp_speculator(path, TargetTables(target))


def logits_of(speculator: MLPSpeculator, hidden_BD: Tensor, token_ids_BJ: Tensor) -> Tensor:
    """[B, J, V] of all heads, with these tokens in front of them."""
    state, found = speculator.first_state(hidden_BD), []
    for head in range(speculator.num_heads):
        state = speculator.step(head, state, token_ids_BJ[:, head])
        found.append(speculator.logits(head, state))
    return torch.stack(found, dim=1)


def expected(tensors: dict[str, Tensor], hidden_BD: Tensor, *, scale_input: bool) -> Tensor:
    arrays = {name: tensor.double().numpy() for name, tensor in tensors.items()}

    def weights(part: str, head: int) -> Any:
        name = f"speculator.{part}.{head}"
        if part == "ln":
            return arrays[f"{name}.weight"], arrays[f"{name}.bias"]
        return arrays[f"{name}.weight"]

    rows = [
        slow.chain_logits(
            hidden_D, tokens_J, weights, n_predict=len(tokens_J), scale_input=scale_input
        )
        for hidden_D, tokens_J in zip(hidden_BD.double().numpy(), TOKENS_BJ.tolist(), strict=True)
    ]
    return torch.tensor(np.array(rows))


def without_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What differs in a tied checkpoint."""
    kept = ("emb.0", "proj.0", "proj.1", "ln.0", "head.0")
    return {name: t for name, t in tensors.items() if any(f"{part}." in name for part in kept)}


def without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}


FORMS: dict[str, tuple[bool, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "untied": (False, dict),
    "tied, stored for each head": (True, dict),
    "tied, stored once": (True, without_copies),
    "without the prefix": (False, without_prefix),
    "tied, without the prefix": (True, without_prefix),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_equal_those_of_the_slow_twin(
    form: str, scale_input: bool, dtype: torch.dtype, target: CausalLM, tmp_path: Path
):
    tied, stored = FORMS[form]
    tensors = mlp_tensors(tied=tied)
    config = mlp_config(tie_weights=tied, scale_input=scale_input)
    speculator = load(write(tmp_path, config, stored(tensors)), target, dtype)
    hidden_BD = 3 * random_hidden(3, dtype)

    got_BJV = logits_of(speculator, hidden_BD, TOKENS_BJ)

    want_BJV = expected(tensors, hidden_BD, scale_input=scale_input)
    tolerance = 1e-9 if dtype is torch.float64 else 1e-4
    assert got_BJV.dtype is dtype
    assert want_BJV.std() > 0.3  # there is something to get wrong
    torch.testing.assert_close(got_BJV.double(), want_BJV, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("inner_dim", [0, None])
def test_an_inner_width_that_is_not_told_is_the_targets(
    inner_dim: int | None, target: CausalLM, tmp_path: Path
):
    shapes = {"emb": (VOCAB, HIDDEN), "proj": (HIDDEN, HIDDEN), "head": (VOCAB, HIDDEN)}
    tensors = {f"speculator.{part}.0.weight": torch.ones(s) for part, s in shapes.items()}
    tensors |= {f"speculator.ln.0.{kind}": torch.ones(HIDDEN) for kind in ("weight", "bias")}
    path = write(tmp_path, mlp_config(1, inner_dim=inner_dim), tensors)

    assert load(path, target).inner_dim == HIDDEN


def test_shared_weights_take_memory_once_and_are_read_by_every_head(
    target: CausalLM, tmp_path: Path
):
    tensors = mlp_tensors(tied=True)
    speculator = load(write(tmp_path, mlp_config(tie_weights=True), tensors), target)

    assert speculator.memory_bytes == sum(t.nbytes * 2 for t in without_copies(tensors).values())
    products = INNER * HIDDEN + 2 * INNER * INNER + 3 * VOCAB * INNER
    assert speculator.weight_bytes == products * 8


PROJ = "speculator.proj.2.weight"


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({}, lambda t: t.pop(PROJ), r"lacks tensors: proj\.2\.weight"),
        ({}, lambda t: t.pop("speculator.ln.1.bias"), r"lacks tensors: ln\.1\.bias"),
        ({}, lambda t: t.update({"extra": torch.ones(2)}), "no use for: extra"),
        ({"n_predict": 2}, lambda t: None, r"no use for: .*emb\.2\.weight"),
        ({"inner_dim": 16}, lambda t: None, r"has shape \[61, 24\], but .* asks for \[61, 16\]"),
        (
            {"tie_weights": True},
            lambda t: None,
            r"'speculator\.\w+\.\d\.\w+' differs from 'speculator\..*', but .* tie_weights",
        ),
        ({"tie_weights": True, "n_predict": 1}, lambda t: None, "n_predict of at least 2"),
        ({"emb_dim": 64}, lambda t: None, "emb_dim=64, the target 32"),
        ({"vocab_size": 64}, lambda t: None, "vocab_size=64, the target 61"),
        ({"n_predict": None}, lambda t: None, "n_predict is missing"),
        ({"inner_dim": -3}, lambda t: None, "inner_dim must be a positive whole number, got -3"),
        ({"method": "sum_lstm"}, lambda t: None, "method='sum_lstm' is not supported"),
        (
            {"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]},
            lambda t: None,
            "ArcticLSTMSpeculatorPreTrainedModel.* is not supported",
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            lambda t: None,
            "is not that of an MLP speculator",
        ),
    ],
)
def test_wrong_checkpoints_are_refused_by_name(
    config: dict[str, Any], change: Any, message: str, target: CausalLM, tmp_path: Path
):
    tensors = mlp_tensors()
    change(tensors)
    path = write(tmp_path, mlp_config(**config), tensors)

    with pytest.raises(ConfigError, match=message):
        load(path, target)


def test_a_tied_checkpoint_needs_both_projections(target: CausalLM, tmp_path: Path):
    tensors = without_copies(mlp_tensors(tied=True))
    del tensors["speculator.proj.1.weight"]
    path = write(tmp_path, mlp_config(tie_weights=True), tensors)

    with pytest.raises(ConfigError, match=r"lacks tensors: proj\.1\.weight"):
        load(path, target)


@pytest.mark.gpu
def test_logits_on_a_gpu_equal_those_on_a_cpu(target: CausalLM, tmp_path: Path):
    path = write(tmp_path, mlp_config(scale_input=True), mlp_tensors())
    hidden_BD = random_hidden(3)

    on_gpu = load_mlp_speculator(path, TargetTables(tiny_target(tmp_path, device="cuda")))

    got_BJV = logits_of(on_gpu, hidden_BD.cuda(), TOKENS_BJ.cuda()).cpu()
    torch.testing.assert_close(got_BJV, logits_of(load(path, target), hidden_BD, TOKENS_BJ))
