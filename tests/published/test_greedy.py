"""Greedy answers are llama.cpp's, or part where the model itself is undecided."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from outdraft import LLM, SamplingParams
from outdraft.config.engine import EngineConfig
from tests.published.llama_cpp import LlamaCpp

# Answers are computed once in a process.
pytestmark = pytest.mark.xdist_group("published_greedy")

NAMES = ("smollm2", "coder05", "coder15")
NUM_TOKENS = 64
UNDECIDED = 0.1  # between the logarithms of two probabilities, computed in float32
QUESTIONS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in three sentences why the sky is blue.",
    "Translate into French: The library opens at nine and closes at five.",
    "Tell a short story about a lighthouse keeper.",
    "List the planets of the solar system, one per line.",
)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def prompts(name: str, llama_cpp: Callable[[str], LlamaCpp]) -> list[list[int]]:
    """The questions as the model's template puts them."""
    oracle = llama_cpp(name)
    asked = [[{"role": "user", "content": text}] for text in QUESTIONS]
    return [oracle.tokenize(oracle.chat_prompt(messages)) for messages in asked]


@pytest.fixture(scope="module")
def answers(
    name: str, published: Callable[[str], Path], prompts: list[list[int]]
) -> dict[str, list[list[int]]]:
    """Ids by method."""
    options = {"device": "cpu", "max_model_len": 512, "num_blocks": 256, "cost_table": "roofline"}
    options["activation_dtype"] = "float"  # as the weights mean it: test_accuracy.py has the other
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    found: dict[str, list[list[int]]] = {}
    models = None
    for method in ("plain", "suffix", "ngram"):
        config = EngineConfig.from_options(
            model=str(published(name)),
            speculative_config=None if method == "plain" else {"method": method},
            **options,
        )
        llm = LLM.from_config(config, models)
        models = llm.models
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found[method] = [output.outputs[0].token_ids for output in outputs]
    return found


@pytest.mark.slow
def test_greedy_answers_are_those_of_llama_cpp(
    name: str,
    llama_cpp: Callable[[str], LlamaCpp],
    exact_llama_cpp: Callable[[str], LlamaCpp],
    prompts: list[list[int]],
    answers: dict[str, list[list[int]]],
):
    for prompt, answer in zip(prompts, answers["plain"], strict=True):
        for place in differences(llama_cpp(name), prompt, answer):
            [choice] = exact_llama_cpp(name).greedy([*prompt, *answer[:place]], 1, top=5)
            best = choice.logprobs[choice.token_id]
            gap = best - choice.logprobs.get(answer[place], float("-inf"))
            assert gap < UNDECIDED, f"token {place} of {answer} is {gap:.3f} below the best"


@pytest.mark.slow
def test_drafts_change_no_greedy_answer(answers: dict[str, list[list[int]]]):
    assert answers["suffix"] == answers["plain"]
    assert answers["ngram"] == answers["plain"]


def differences(oracle: LlamaCpp, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[int]:
    """Places of the answer that are not the oracle's choice after everything before them."""
    place = 0
    while place < len(answer):
        choices = oracle.greedy([*prompt, *answer[:place]], len(answer) - place)
        pairs = zip(choices, answer[place:], strict=False)
        same = [choice.token_id == got for choice, got in pairs] + [False]
        place += same.index(False)
        if place < len(answer):
            yield place
        place += 1
