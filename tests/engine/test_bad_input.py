"""Wrong input gives a clear error that names the field, before any work; the engine goes on."""

import json
import math
from typing import Any

import numpy as np
import pytest

from outdraft.core.errors import CapacityError, ConfigError, RequestError
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import Assembler
from outdraft.engine.llm import LLM
from outdraft.text.tokenizer import load_tokenizer
from tests.oracle.engines import (
    VOCAB_SIZE,
    config,
    engine,
    greedy,
    ids,
    pair,
    prompts_of,
    run,
    speculation,
    tokenizer,
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return engine("qwen2", "combined", max_waiting=50)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ("", {}, "prompt"),
        ([5] * 96, {}, "prompt"),
        ([5, VOCAB_SIZE], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([2], {"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ([2], {"stop_token_ids": [-3]}, "stop_token_ids"),
        ([2], {"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ([2], {"bad_words": [""]}, "bad_words"),
        ([2], {"speculation": {"method": "eagle"}}, "speculation"),
        ([2], {"n": 100}, "n"),
    ],
)
def test_a_wrong_request_is_refused_by_name(llm: LLM, prompt: Any, params: dict, field: str):
    with pytest.raises(RequestError) as caught:
        llm.generate([[2, 3], prompt], SamplingParams(**params), use_tqdm=False)
    assert caught.value.field == field
    assert not llm.engine.has_work
    assert llm.engine.scheduler.pool.usage == 0


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        (None, SamplingParams(), "prompts"),
        (5, SamplingParams(), "prompts"),
        ([[2]], {"temperature": 0}, "sampling_params"),
        ([[2]], [{"temperature": 0}], "sampling_params"),
        ([[2]], 0.5, "sampling_params"),
    ],
)
def test_what_is_no_prompt_or_no_parameters_is_refused(
    llm: LLM, prompts: Any, params: Any, field: str
):
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, params, use_tqdm=False)
    assert caught.value.field == field


def test_an_array_of_token_ids_is_one_prompt(llm: LLM):
    [prompt] = prompts_of([7])
    assert ids(run(llm, np.array(prompt), greedy(5))) == ids(run(llm, [prompt], greedy(5)))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, -0.1, math.inf, "hot", True])
def test_a_wrong_temperature_is_refused(value: Any):
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=value)


def test_a_wrong_request_harms_no_other(llm: LLM):
    core = llm.engine
    assembler = Assembler(core)
    alone = ids(run(llm, prompts_of([7]), greedy(12)))
    assembler.add_request("good", prompts_of([7])[0], greedy(12))
    assembler.step()
    with pytest.raises(RequestError):
        assembler.add_request("bad", [2, 99], greedy(12))
    with pytest.raises(RequestError, match="in use"):
        assembler.add_request("good", [2], greedy(12))
    finished = [o for _ in range(20) for o in assembler.step() if o.finished]
    assert ids(finished) == alone
    core.check_invariants()


def test_a_full_queue_says_so_and_keeps_what_it_accepted():
    assembler = Assembler(engine("qwen2", "plain", max_waiting=2).engine)
    assembler.add_request("0", [2], greedy(3))
    assembler.add_request("1", [2], greedy(3))
    with pytest.raises(CapacityError, match="full"):
        assembler.add_request("2", [2], greedy(3))
    finished = [o.request_id for _ in range(10) for o in assembler.step() if o.finished]
    assert finished == ["0", "1"]


def test_offline_generation_takes_more_prompts_than_the_queue_holds():
    llm = engine("qwen2", "plain", max_waiting=2)
    prompts = prompts_of([3, 4, 5, 6, 7, 8, 9])
    assert ids(run(llm, prompts, greedy(5))) == ids(
        run(engine("qwen2", "plain"), prompts, greedy(5))
    )


def test_a_request_that_never_fits_the_cache_is_refused():
    small = engine("qwen2", "plain", num_blocks=2)
    with pytest.raises(RequestError, match="KV cache"):
        small.generate([[2] * 30], greedy(30), use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_length": 5}, "did you mean 'max_model_len'"),
        ({"dtype": "int3"}, "dtype"),
        ({"max_model_len": 10_000}, "positions"),
        ({"kv_cache_memory_bytes": 1 << 50}, "free"),
        ({"kv_cache_memory_bytes": 10}, "one block takes"),
        ({"speculative_config": {"metod": "ngram"}}, "did you mean 'method'"),
        ({"speculative_config": {"method": "telepathy"}}, "one of"),
        ({"speculative_config": {"method": "draft_model"}}, "needs a model"),
        ({"speculative_config": {"method": "draft_model", "model": "/nowhere"}}, "/nowhere"),
        ({"kernels": "flash"}, "unknown kernels"),
        ({"device": "gpu"}, "device"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        LLM(**{"model": str(pair("qwen2").target), "device": "cpu"} | options)


def test_a_drafter_that_shares_too_few_tokens_is_refused(tmp_path: Any):
    paths = pair("qwen2")
    for file in paths.drafter.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    renamed = {f"x{word}" if number > 20 else word: number for word, number in vocabulary.items()}
    tokenizer["model"]["vocab"] = renamed
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    speculative = {"model": str(tmp_path), "min_vocabulary_overlap": 0.5}
    with pytest.raises(ConfigError, match=r"min_vocabulary_overlap=0\.5"):
        LLM(model=str(paths.target), device="cpu", speculative_config=speculative)


def test_models_loaded_for_another_configuration_are_refused():
    loaded = engine("qwen2", "plain").models
    with pytest.raises(ConfigError, match="kernels"):
        LLM.from_config(config("qwen2", None, kernels="reference"), loaded)
    with pytest.raises(ConfigError, match=r"draft_model .* was not loaded"):
        LLM.from_config(config("qwen2", speculation("qwen2", "perfect", 2)), loaded)


def test_a_draft_model_that_was_loaded_to_draft_token_by_token_drafts_not_in_parallel():
    parallel = speculation("qwen2", "pard", 2)
    one_by_one = config("qwen2", parallel | {"parallel_drafting": False})
    with pytest.raises(ConfigError, match="was loaded without parallel_drafting"):
        LLM.from_config(config("qwen2", parallel), LLM.from_config(one_by_one).models)


def test_a_tokenizer_that_was_saved_with_truncation_does_not_cut_prompts(tmp_path: Any):
    words = tokenizer()
    words.enable_truncation(3)
    words.enable_padding(length=8)
    words.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("w1 w2 w3 w4 w5").ids == [1, 2, 3, 4, 5]


def test_a_priority_that_cannot_be_ordered_is_refused(llm: LLM):
    with pytest.raises(RequestError, match="priority"):
        llm.engine.add_request("nan", [2], greedy(3), priority=math.nan)
    llm.engine.check_invariants()
