"""Greedy texts of Gemma 3, which the transformers library computes, are llama.cpp's, or part where
the model itself is undecided."""

from collections.abc import Callable
from pathlib import Path

import pytest

from outdraft import LLM, SamplingParams
from tests.published.llama_cpp import LlamaCpp
from tests.published.test_greedy import UNDECIDED, differences

pytestmark = pytest.mark.xdist_group("published_gemma")

NAME, NUM_TOKENS = "gemma270", 64
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time",
    "Water boils at",
    "The three primary colours are",
    "In 1969, the first man",
    "Dear Sir or Madam,\n\nI am writing",
    "import numpy as np\n\n",
    "The quick brown fox",
    "Question: What is the largest planet?\nAnswer:",
    "Der Hund läuft",
    "Il était une fois",
    "El sol brilla",
    "1, 1, 2, 3, 5, 8,",
    "Ingredients:\n- 2 eggs\n-",
    "The theory of evolution says that",
    "SELECT name FROM users WHERE",
    "<html>\n<body>\n",
    "My favourite book is",
    # More than the window of 512 tokens.
    "A list of numbers. " + " ".join(str(number) for number in range(200)),
)


def test_greedy_texts_of_gemma_are_those_of_llama_cpp(
    published: Callable[[str], Path],
    llama_cpp: Callable[[str], LlamaCpp],
    exact_llama_cpp: Callable[[str], LlamaCpp],
):
    options = {"device": "cpu", "max_model_len": 1024, "cost_table": "roofline", "dtype": "float32"}
    llm = LLM(str(published(NAME)), activation_dtype="float", **options)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    for output in llm.generate([*PROMPTS], params, use_tqdm=False):
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        assert prompt == llama_cpp(NAME).tokenize(output.prompt or "", add_special=True)
        for place in differences(llama_cpp(NAME), prompt, answer):
            [choice] = exact_llama_cpp(NAME).greedy([*prompt, *answer[:place]], 1, top=5)
            best = choice.logprobs[choice.token_id]
            gap = best - choice.logprobs.get(answer[place], float("-inf"))
            assert gap < UNDECIDED, f"token {place} of {answer} is {gap:.3f} below the best"
