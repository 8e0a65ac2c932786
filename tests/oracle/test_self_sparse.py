"""The target drafts for itself over a part of each text. Its texts stay those of plain decoding.

What a draft pass writes is written again by the target's pass before anything reads it. So a test
spoils all of it, and nothing changes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outdraft.core.errors import ConfigError
from outdraft.core.sampling import SamplingParams, SpeculationParams
from outdraft.drafting.device.asks import DraftModelAsk
from outdraft.drafting.device.self_drafter import SelfDrafter
from outdraft.engine.llm import LLM
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.draft_ops import Growth
from outdraft.loading.models import load_models
from outdraft.runner.model_runner import ModelRunner
from tests.oracle.engines import (
    LIBRARY,
    TREE,
    config,
    engine,
    greedy,
    greedy_oracle,
    ids,
    pair,
    prompts_of,
    run,
)

KERNELS = ("auto", "reference")
LENGTHS, NUM_TOKENS = (3, 21, 60, 9, 48), 30
CHAIN = {"num_speculative_tokens": 3}
SPARSE = {"kv_budget": 16}  # four blocks
BOTH = {"kv_budget": 18, "quantization": "int4"}
SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=24, ignore_eos=True)


def sparse_engine(family: str, speculative: dict[str, Any], **options: Any) -> LLM:
    options = {"block_size": 4, "num_blocks": 256, **options}
    chosen = config(family, {"method": "self", "control": "fixed", **speculative}, **options)
    return LLM.from_config(chosen, load_models(chosen))


def drafter_of(llm: LLM) -> SelfDrafter:
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    assert runner.proposer is not None
    assert isinstance(runner.proposer.drafter, SelfDrafter)
    return runner.proposer.drafter


class Watched:
    """A drafter whose every draft is looked at: what it was asked, and which slots it wrote.

    Attributes:
        num_narrowed: requests whose tables left blocks out.
        num_written: slots.
    """

    def __init__(self, llm: LLM, spoils: bool = False) -> None:
        self._llm, self._spoils = llm, spoils
        self._drafter = drafter_of(llm)
        self._draft = self._drafter.draft
        self._drafter.draft = self.draft
        self.num_narrowed = self.num_written = 0

    def draft(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: torch.Tensor, growth: Growth
    ) -> DraftBatch:
        cache = self._llm.engine.runner.cache
        before = [(layer.k_PSGC.clone(), layer.v_PSGE.clone()) for layer in cache.layers]
        drafts = self._draft(asks, token_ids_SL, growth)
        own = {
            ask.block_ids[index // cache.block_size] * cache.block_size + index % cache.block_size
            for ask in asks
            for index in range(ask.num_tokens - 1, ask.num_tokens + ask.num_drafts)
        }
        pool = self._llm.engine.scheduler.pool
        for layer, old in zip(cache.layers, before, strict=True):
            for now_PSGC, old_PSGC in zip((layer.k_PSGC, layer.v_PSGE), old, strict=True):
                is_new = (now_PSGC != old_PSGC).flatten(2).any(2).flatten()
                written = set(is_new.nonzero().flatten().tolist())
                assert written <= own, "a slot of a text's settled tokens, or of another text"
                blocks = {slot // cache.block_size for slot in written}
                assert not blocks & {*pool._blocks.values()}, "a block that others can find"
                assert all(pool._counts[block] == 1 for block in blocks), "a shared block"
                self.num_written += len(written)
                if self._spoils:
                    now_PSGC.flatten(0, 1)[sorted(own)] = torch.nan
        self.num_narrowed += sum(
            ask.num_tokens > len(ask.block_ids) * cache.block_size
            for ask in (self._drafter._attended.narrowed(asks) if self._drafter._attended else ())
        )
        return drafts


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("speculative", [SPARSE, BOTH], ids=["sparse", "sparse-int4"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_greedy_ids_are_those_of_transformers(
    kernels: str, speculative: dict[str, Any], shape: dict[str, Any]
):
    family = "llama-llama3-rope"
    llm = sparse_engine(family, {**speculative, **shape}, kernels=kernels)
    watched = Watched(llm)
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle(family, LENGTHS, NUM_TOKENS)
    assert watched.num_narrowed > 0
    assert watched.num_written > 0


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("speculative", [SPARSE, {"quantization": "int8"}], ids=["sparse", "int8"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_what_drafts_wrote_is_never_read_by_the_target(
    kernels: str, speculative: dict[str, Any], shape: dict[str, Any]
):
    llm = sparse_engine("qwen2", {**speculative, **shape}, kernels=kernels, num_blocks=48)
    watched = Watched(llm, spoils=True)
    for _ in range(2):  # the second time with the prefix cache of the first
        outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
        assert ids(outputs) == greedy_oracle("qwen2", LENGTHS, NUM_TOKENS)
    assert watched.num_written > 0
    assert max(output.num_cached_tokens for output in outputs) > 0


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_a_preempted_request_drafts_on_over_a_part_of_its_text(shares_prefixes: bool):
    options = {"num_blocks": 36, "enable_prefix_caching": shares_prefixes}
    llm = sparse_engine("qwen2", {**SPARSE, **CHAIN}, **options)
    watched = Watched(llm)
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle("qwen2", LENGTHS, NUM_TOKENS)
    preempted = [o for o in outputs if o.metrics is not None and o.metrics.num_preemptions]
    assert preempted
    assert watched.num_narrowed > 0
    if shares_prefixes:
        for num_hits in (0, 32):  # the pool holds no more than this text
            [again] = run(llm, prompts_of(LENGTHS)[2:3], greedy(NUM_TOKENS))
            assert ids([again]) == greedy_oracle("qwen2", LENGTHS, NUM_TOKENS)[2:3]
            assert again.num_cached_tokens >= num_hits


def test_seeded_ids_are_those_of_plain_decoding():
    for dtype in ("float32", "bfloat16"):
        options = {"dtype": dtype, "block_size": 4}
        llm = sparse_engine("qwen2", {**SPARSE, **CHAIN}, **options)
        plain = engine("qwen2", "plain", num_blocks=256, **options)
        prompts = prompts_of(LENGTHS)
        assert ids(run(llm, prompts, SEEDED)) == ids(run(plain, prompts, SEEDED))
        assert llm.engine.stats.num_accepted_tokens > 0


@torch.inference_mode()
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_attention_of_the_newest_row_is_that_of_transformers(shape: dict[str, Any]):
    [prompt], size = prompts_of((50,)), 4
    llm = sparse_engine("llama-llama3-rope", {**SPARSE, **shape})
    attended = drafter_of(llm)._attended
    assert attended is not None
    masses = attended._masses
    found: dict[int, torch.Tensor] = {}  # by the position of the row

    def watched(asks: Sequence[DraftModelAsk]) -> torch.Tensor:
        mass_BP = masses(asks)
        [ask] = asks
        found[ask.num_tokens - 2] = mass_BP[0].clone()
        return mass_BP

    attended._masses = watched
    [output] = run(llm, [prompt], greedy(30))
    text = torch.tensor([prompt + output.outputs[0].token_ids])
    path = pair("llama-llama3-rope").target
    oracle = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    attentions = oracle(text, output_attentions=True).attentions
    compared = [position for position in found if 50 <= position < text.shape[1]]
    assert len(compared) > 5
    for newest in compared:
        weights = sum(attentions[layer][0, :, newest].sum(0) for layer in attended.layers)
        padded = torch.nn.functional.pad(weights, (0, -len(weights) % size))
        seen = padded.view(-1, size).sum(1)[: newest // size + 1]
        torch.testing.assert_close(found[newest], seen, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("drafts", [0, 3])
def test_only_steps_with_drafts_look_at_what_was_attended_to(drafts: int):
    llm = sparse_engine("qwen2", {**SPARSE, **CHAIN})
    drafter, looked, drafting = drafter_of(llm), [0], [0]
    attended, draft = drafter._attended, drafter.draft
    assert attended is not None
    block_mass = attended._target.kernels.block_mass

    def counted(*args: Any) -> torch.Tensor:
        looked[0] += 1
        return block_mass(*args)

    def watched(asks: Sequence[DraftModelAsk], *others: Any) -> DraftBatch:
        drafting[0] += 1
        return draft(asks, *others)

    attended._target.kernels = replace(attended._target.kernels, block_mass=counted)
    drafter.draft = watched
    speculation = SpeculationParams(num_speculative_tokens=drafts)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculation=speculation)
    run(llm, prompts_of((40,)), params)
    assert llm.engine.stats.num_draft_tokens > 0 if drafts else drafting == [0]
    assert looked[0] == drafting[0] * len(attended.layers)


def test_a_model_with_windows_is_refused_by_its_name():
    chosen = config("mistral-window", {"method": "self", "kv_budget": 64})
    with pytest.raises(ConfigError, match="MistralForCausalLM"):
        load_models(chosen)


def test_a_network_of_the_library_is_refused_by_its_name():
    chosen = config(LIBRARY + "granite", {"method": "self", "kv_budget": 64})
    with pytest.raises(ConfigError, match="GraniteForCausalLM"):
        load_models(chosen)


def test_a_budget_of_less_than_four_blocks_is_refused():
    chosen = config("qwen2", {"method": "self", "kv_budget": 63})
    with pytest.raises(ConfigError, match="kv_budget must be at least 4 blocks"):
        LLM.from_config(chosen, load_models(chosen))


def test_a_budget_takes_nothing_of_the_cache_and_no_weights():
    llm, plain = sparse_engine("qwen2", SPARSE), engine("qwen2", "plain", block_size=4)
    assert llm.memory.drafter_weights == 0
    assert llm.memory.block_bytes == plain.memory.block_bytes
