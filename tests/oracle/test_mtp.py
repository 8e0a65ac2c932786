"""A target that drafts with the layer behind its own: its texts are those of plain decoding."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from outdraft.core.errors import ConfigError
from outdraft.engine.llm import LLM
from tests.models.checkpoints import qwen2, randomised, save
from tests.models.families import randomised_family
from tests.models.mtp_checkpoints import add_library_layer, add_mimo_layer
from tests.oracle.engines import (
    MIMO,
    MTP,
    MTP_FAMILIES,
    config,
    engine,
    greedy,
    greedy_oracle,
    ids,
    parts,
    prompts_of,
    run,
    speculation,
)
from tests.oracle.test_distribution import ALPHA, VOCAB_SIZE, counts, exact, p_value
from tests.pairwise import rows
from tests.ranks import Spread, spread_models

LENGTHS, NUM_TOKENS = (3, 21, 40, 9, 33), 30
WAYS: dict[str, dict[str, Any]] = {
    "as-it-comes": {},
    "block-size-1": {"block_size": 1, "num_blocks": 400},
    "tiny-chunks": {"block_size": 16, "max_num_batched_tokens": 4},
    "preempted": {"num_blocks": 6, "enable_prefix_caching": False},
    "preempted-with-prefix-cache": {"num_blocks": 6},
    "reference": {"kernels": "reference"},
    "adaptive": {"control": "adaptive"},
}


@pytest.mark.slow
@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("method", "family", "way"),
    rows(
        product(MTP, MTP_FAMILIES, WAYS),
        lambda method, family, way: (*parts(method), family, way),
    ),
)
def test_every_way_to_run_a_batch_equals_transformers(method: str, family: str, way: str):
    llm = engine(family, method, **WAYS[way])
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle(family, LENGTHS, NUM_TOKENS)
    if way != "adaptive":
        assert llm.engine.stats.num_draft_tokens > 100
    if WAYS[way].get("num_blocks") == 6:
        assert any(output.metrics.num_preemptions for output in outputs)


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_a_prefix_hit_restores_target_and_drafter(family: str):
    llm = engine(family, "mtp")
    first = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    steps = llm.engine.stats.num_steps
    second = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(first) == ids(second) == greedy_oracle(family, LENGTHS, NUM_TOKENS)
    assert [output.num_cached_tokens for output in second] == [0, 16, 32, 0, 32]
    assert llm.engine.stats.num_steps <= 2 * steps


@pytest.mark.few(3)
@pytest.mark.parametrize("family", MTP_FAMILIES)
@pytest.mark.parametrize("draft_size", [1, 2])
def test_over_two_ranks_the_ids_are_the_same(family: str, draft_size: int):
    chosen = config(family, speculation(family, "mtp", 3), dtype="float64")
    if draft_size > 1 and family != MIMO:
        with pytest.raises(ConfigError, match="draft_tensor_parallel_size must be 1 for the MTP"):
            spread_models(chosen, 2, draft_size)
        return
    models = spread_models(chosen, 2, draft_size)
    llm = LLM.from_config(chosen, models[0])
    with Spread(llm, models):
        outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle(family, LENGTHS, NUM_TOKENS)


@pytest.fixture(scope="module")
def checkpoints(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Any]:
    folder = tmp_path_factory.mktemp("mtp")
    if request.param == "mimo":
        target = randomised(qwen2(vocab_size=VOCAB_SIZE, num_hidden_layers=2), seed=2)
        target.get_input_embeddings().weight.data.mul_(0.5)
        add_layer = add_mimo_layer
    else:
        target = randomised_family(request.param, vocab_size=VOCAB_SIZE)
        target.set_experts_implementation("eager")  # the others do not know float64
        add_layer = add_library_layer
    target.lm_head.weight.data.mul_(0.25)
    path = add_layer(save(target, folder / "target"))
    return path, path, target.double()  # so that the exact probabilities have the sum of 1


CHAIN, TREE = {"num_speculative_tokens": 3}, {"tree_levels": [2, 2, 1]}
BY_TOKEN = CHAIN | {"rejection_sample_method": "token"}


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoints", "options"),
    [
        *(("mimo", options) for options in (CHAIN, BY_TOKEN, TREE)),
        ("deepseek-v3", TREE),
        *(pytest.param("deepseek-v3", one, marks=pytest.mark.full) for one in (CHAIN, BY_TOKEN)),
    ],
    indirect=["checkpoints"],
)
def test_texts_follow_the_targets_distribution(options: dict[str, Any], checkpoints: Any):
    found = counts(checkpoints, {"method": "mtp", **options})
    assert p_value(found, exact(checkpoints)) > ALPHA
