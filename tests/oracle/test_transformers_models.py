"""Families whose network the transformers library computes: they answer as its `generate` does."""

from collections import Counter
from itertools import cycle, product

import pytest
from safetensors.torch import load_file
from torch import Tensor, nn

from outdraft.core.errors import ConfigError
from outdraft.engine.llm import LLM
from outdraft.kernels.choose import kernels_options
from outdraft.models.base import LanguageModel
from outdraft.models.checkpoints.files import StoredTensors
from outdraft.models.library.experts import PackedExperts
from tests.models.families import CONFIGS
from tests.oracle.engines import (
    LIBRARY,
    config,
    engine,
    greedy,
    greedy_oracle,
    ids,
    prompts_of,
    run,
    speculation,
)
from tests.pairwise import some
from tests.ranks import Spread, spread_models

FILE = "model.safetensors"
LENGTHS, NUM_TOKENS = (3, 21, 40, 9, 33), 30
METHODS = ("plain", "draft_model", "perfect-tree", "suffix-tree", "eagle3")
FAMILIES = [LIBRARY + name for name in CONFIGS]
OTHERS = [method for method in METHODS if method != "perfect-tree"]
CHOSEN = [  # each has a tree of which much is accepted, every third one another method in turn
    *((family, "perfect-tree") for family in FAMILIES),
    *zip(FAMILIES[::3], cycle(OTHERS), strict=False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method"),
    [
        *some(product(FAMILIES, METHODS), CHOSEN),
        *((LIBRARY + "mistral-3-vl", method) for method in METHODS[:-1]),
    ],
)
def test_greedy_ids_are_those_of_generate(family: str, method: str) -> None:
    """Prompts in chunks, with requests of other lengths beside them."""
    options = kernels_options()
    kernels = options[(len(family) + METHODS.index(method)) % len(options)]
    llm = engine(family, method, kernels=kernels)
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle(family, LENGTHS, NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("family", "method", "draft_size"),
    [
        *((family, "draft_model", 1) for family in ("deepseek-v3", "gemma-2", "smollm-3")),
        *((family, "eagle3", 1) for family in ("granite", "qwen-3-moe")),
        *((family, "suffix", 1) for family in ("glm-4-moe", "llama-4", "mixtral")),
        ("llama", "draft_model-tree", 2),
        ("mistral-3-vl", "draft_model", 1),
        ("olmo-2", "suffix", 1),
    ],
)
def test_over_two_ranks_the_ids_are_the_same(family: str, method: str, draft_size: int) -> None:
    """By the library's plan for the family."""
    chosen = config(LIBRARY + family, speculation(LIBRARY + family, method, 3), dtype="float64")
    models = spread_models(chosen, 2, draft_size)
    whole = engine(LIBRARY + family, "plain", dtype="float64").engine.runner.model
    for one in models:
        assert one.target.memory_bytes < whole.memory_bytes
        assert expert_bytes(one.target) * 2 == expert_bytes(whole)
    llm = LLM.from_config(chosen, models[0])
    with Spread(llm, models):
        outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle(LIBRARY + family, LENGTHS, NUM_TOKENS)


def expert_bytes(model: LanguageModel) -> int:
    assert isinstance(model, nn.Module)
    layers = [part for part in model.modules() if isinstance(part, PackedExperts)]
    return sum(part.packed_bytes for part in layers if part.num_experts > 1)


@pytest.mark.parametrize(("family", "num_divided"), [("smollm-3", 10), ("qwen-3-moe", 30)])
def test_ranks_read_only_their_parts_of_what_they_divide(
    family: str, num_divided: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Counter[str]()
    whole, part = StoredTensors.read, StoredTensors.read_part

    def noted(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 2:
            found[name] += tensor.numel()
        return tensor

    monkeypatch.setattr(StoredTensors, "read", lambda own, name: noted(name, whole(own, name)))
    monkeypatch.setattr(
        StoredTensors, "read_part", lambda own, name, *cut: noted(name, part(own, name, *cut))
    )
    path = spread_models(config(LIBRARY + family, None), 2, 1)[0].path
    sizes = {name: tensor.numel() for name, tensor in load_file(path / FILE).items()}
    divided = {name for name in sizes if "_proj" in name}
    assert len(divided) > num_divided
    assert {name: found[name] for name in divided} == {name: sizes[name] for name in divided}
    table = "model.embed_tokens.weight"  # whole on both
    assert found[table] >= 2 * sizes[table]
    routers = {name for name in sizes if name.endswith("mlp.gate.weight")}
    assert set(found) <= {*divided, *routers, table, "lm_head.weight"}


def test_a_family_without_a_plan_needs_one_rank() -> None:
    chosen = config(LIBRARY + "falcon", None)
    with pytest.raises(ConfigError, match="no plan to divide falcon"):
        spread_models(chosen, 2, 1)
