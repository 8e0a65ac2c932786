"""The target drafts for itself. Its texts stay those of plain decoding."""

from typing import Any

import pytest

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError
from outdraft.core.sampling import SamplingParams
from outdraft.core.weights import QUANTIZATIONS
from outdraft.engine.llm import LLM
from outdraft.loading.models import load_models
from outdraft.models.decoder.causal_lm import CausalLM
from tests.oracle.engines import (
    FAMILIES,
    LIBRARY,
    TREE,
    config,
    engine,
    greedy,
    greedy_oracle,
    ids,
    prompts_of,
    run,
)

LENGTHS, NUM_TOKENS = (3, 21, 40, 9, 33), 30
CHAIN = {"num_speculative_tokens": 3}
SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=24, ignore_eos=True)


def self_engine(family: str, speculative: dict[str, Any], **options: Any) -> LLM:
    chosen = config(family, {"method": "self", "control": "fixed", **speculative}, **options)
    return LLM.from_config(chosen, load_models(chosen))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_copy_in_four_bits_drafts_and_greedy_ids_are_those_of_transformers(
    family: str, shape: dict[str, Any], kernels: str
):
    llm = self_engine(family, {"quantization": "int4", **shape}, kernels=kernels)
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle(family, LENGTHS, NUM_TOKENS)
    assert llm.engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["gpt-2", "granite", "qwen-3-moe"])
def test_a_copy_in_four_bits_drafts_for_a_network_of_the_library(
    family: str, shape: dict[str, Any]
):
    """Biases and layers that are stored transposed; factors on streams; experts."""
    family = LIBRARY + family
    llm = self_engine(family, {"quantization": "int4", **shape})
    models = load_models(llm.config)
    assert models.drafter is not None
    assert 0 < models.drafter.network.weight_bytes < models.target.weight_bytes
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle(family, LENGTHS, NUM_TOKENS)
    assert llm.engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_bfloat16_ids_and_seeded_ids_are_those_of_plain_decoding(quantization: str):
    options = {"dtype": "bfloat16"}
    llm = self_engine("qwen3-window", {"quantization": quantization, **CHAIN}, **options)
    plain = engine("qwen3-window", "plain", **options)
    for params in (greedy(24), SEEDED):
        assert ids(run(llm, prompts_of(LENGTHS), params)) == ids(
            run(plain, prompts_of(LENGTHS), params)
        )
    assert llm.engine.stats.num_accepted_tokens > 0


def test_a_preempted_request_and_one_with_a_cached_prefix_draft_on_with_the_same_ids():
    llm = self_engine("qwen2", {"quantization": "int8", **CHAIN}, num_blocks=9)
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle("qwen2", LENGTHS, NUM_TOKENS)
    assert max(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    again = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(again) == greedy_oracle("qwen2", LENGTHS, NUM_TOKENS)


def test_a_copy_takes_memory_for_its_weights_and_none_of_the_cache():
    llm, plain = self_engine("qwen2", {"quantization": "int4", **CHAIN}), engine("qwen2", "plain")
    models = load_models(llm.config)
    assert models.drafter is not None
    assert isinstance(models.drafter.network, CausalLM)
    assert llm.memory.drafter_weights == models.drafter.network.memory_bytes > 0
    assert llm.memory.block_bytes == plain.memory.block_bytes


def test_it_is_refused_where_ranks_divide_the_cache():
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        EngineConfig.from_options(
            model="m",
            tensor_parallel_size=2,
            speculative_config={"method": "self", "quantization": "int4"},
        )
