"""Prompts in vLLM's shapes give what the same text or ids give."""

import pytest

from outdraft.core.errors import RequestError
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM
from tests.oracle.engines import engine

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
TEXT = "w3 w5 w7"
IDS = [3, 5, 7]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return engine("qwen2", "plain", block_size=4)


def outputs_of(llm: LLM, prompts) -> list[tuple[str | None, list[int], list[int]]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [(one.prompt, one.prompt_token_ids, one.outputs[0].token_ids) for one in outputs]


def test_a_dict_is_one_prompt_and_a_list_of_them_is_several(llm: LLM):
    [(_, _, expected)] = outputs_of(llm, TEXT)
    assert outputs_of(llm, {"prompt": TEXT}) == [(TEXT, IDS, expected)]
    assert outputs_of(llm, {"prompt_token_ids": IDS}) == [(None, IDS, expected)]
    assert outputs_of(llm, [{"prompt": TEXT}, {"prompt_token_ids": IDS}, TEXT, IDS]) == [
        (TEXT, IDS, expected),
        (None, IDS, expected),
        (TEXT, IDS, expected),
        (None, IDS, expected),
    ]


def test_a_dict_of_another_shape_is_refused_before_anything_runs(llm: LLM):
    with pytest.raises(RequestError, match="'text' is not supported") as caught:
        llm.generate([TEXT, {"text": TEXT}], GREEDY, use_tqdm=False)  # pyright: ignore
    assert caught.value.field == "prompt"
    assert not llm.engine.has_work


def test_prompts_share_cached_blocks_only_with_those_of_their_own_salt(llm: LLM):
    def num_cached(salt: str | None) -> int:
        prompt = {"prompt_token_ids": [2, 4, 6, 8] * 4}
        if salt is not None:
            prompt["cache_salt"] = salt
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
        return output.num_cached_tokens

    salts = (None, "a", "b")
    assert [num_cached(salt) for salt in salts] == [0, 0, 0]
    assert [num_cached(salt) for salt in salts] == [12, 12, 12]
