"""Logits that are no numbers end their request with an error, and nobody else's.

One token's embedding is NaN or infinite: texts without it are as ever, a text ends behind it.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
import torch

from outdraft.core.errors import GenerationError
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.async_engine import AsyncEngine
from outdraft.engine.llm import LLM
from outdraft.kernels.torch.decoder import TorchDecoder
from tests.oracle.engines import engine, greedy, ids, prompts_of, run

COMPILED, BY_LAYERS = "llama-llama3-rope", "qwen2"
METHODS = ("plain", "suffix", "draft_model", "combined", "eagle3-tree", "medusa")
GOOD = prompts_of((9, 20, 5))
NUM_TOKENS = 16
PARAMS = {
    "greedy": greedy(NUM_TOKENS),
    "greedy, with more": greedy(NUM_TOKENS, logprobs=2, repetition_penalty=1.1),
    "sampled": SamplingParams(seed=3, max_tokens=NUM_TOKENS, ignore_eos=True),
    "sampled, with more": SamplingParams(
        seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, top_p=0.9, logprobs=1
    ),
}


@contextmanager
def broken(llm: LLM, token_id: int, value: float = float("nan")) -> Iterator[None]:
    """Engines share their weights: they are mended afterwards."""
    table = llm.models.target.embed_tokens.source
    row = table[token_id].clone()
    table[token_id] = value
    try:
        yield
    finally:
        table[token_id] = row


def outputs_of(llm: LLM, prompts: Sequence[list[int]], params: Any) -> list[RequestOutput]:
    """Also where some have failed."""
    try:
        return run(llm, prompts, params)
    except GenerationError as error:
        return list(error.outputs)


def first_seen_late(texts: Sequence[list[int]]) -> tuple[int, int, int]:
    """(text, place, token): a token in the middle of a text that is in no prompt, and in no other
    text."""
    for number, text in enumerate(texts):
        others = set(chain(*GOOD, *texts[:number], *texts[number + 1 :]))
        for place in range(3, NUM_TOKENS - 2):
            if text[place] not in {*others, *text[:place]}:
                return number, place, text[place]
    raise AssertionError("choose other prompts")


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("family", [COMPILED, BY_LAYERS])
@pytest.mark.parametrize("method", METHODS)
def test_a_text_ends_behind_the_token_that_breaks_it_and_the_others_go_on(
    method: str, family: str, name: str
):
    params = PARAMS[name]
    right = ids(run(engine(family, "plain"), GOOD, params))
    number, place, token = first_seen_late(right)
    llm = engine(family, method)
    with broken(llm, token):
        outputs = outputs_of(llm, GOOD, params)
    for at, output in enumerate(outputs):
        [completion] = output.outputs
        if at != number:
            assert completion.token_ids == right[at]
            assert completion.finish_reason == "length"
            assert output.error is None
        else:
            assert completion.token_ids == right[at][: place + 1]
            assert len(completion.origins) == place + 1
            assert len(completion.logprobs or ()) == (place + 1) * (params.logprobs is not None)
            assert completion.finish_reason == "error"
            assert f"no finite logits for token {place + 2} of the output" in output.error


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("method", ["plain", "combined", "eagle3-tree"])
@pytest.mark.parametrize("family", [COMPILED, BY_LAYERS])
def test_a_broken_prompt_gives_no_token_and_leaves_nothing_to_who_gets_its_blocks(
    family: str, method: str, value: float
):
    llm = engine(family, method, num_blocks=12)
    params = greedy(NUM_TOKENS)
    right = ids(run(engine(family, "plain"), GOOD, params))
    token = min({*range(6, 60)} - {*chain(*GOOD, *right)})
    with broken(llm, token, value):
        for _ in range(2):
            outputs = outputs_of(llm, [[*[5] * 30, token, 7], *GOOD, [token]], params)
            assert [len(output.outputs[0].token_ids) for output in outputs] == [0, 16, 16, 16, 0]
            assert [output.outputs[0].finish_reason for output in outputs][::4] == ["error"] * 2
            assert ids(outputs[1:4]) == right
    assert ids(run(llm, GOOD, params)) == right


def spoilt(logits_RV: torch.Tensor, kind: str) -> torch.Tensor:
    logits_RV = logits_RV.clone()
    if kind == "one NaN":
        logits_RV[:, 40] = -torch.nan
    elif kind == "one inf":
        logits_RV[:, 40] = torch.inf
    else:
        logits_RV[:] = -torch.inf if kind == "all -inf" else torch.nan
    return logits_RV


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("kind", ["one NaN", "all NaN", "one inf", "all -inf"])
def test_every_kind_of_logits_to_which_there_is_no_best_is_an_error(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    logits = TorchDecoder.logits
    monkeypatch.setattr(TorchDecoder, "logits", lambda *args: spoilt(logits(*args), kind))
    llm = engine("qwen2", "ngram", kernels="reference")
    for output in outputs_of(llm, GOOD, PARAMS[name]):
        assert output.outputs[0].token_ids == []
        assert "they are NaN, infinite or all -inf" in output.error


def test_the_error_says_how_many_failed_and_has_all_outputs():
    llm = engine(BY_LAYERS, "ngram")
    with (
        broken(llm, 60),
        pytest.raises(GenerationError, match=r"2 of 3 requests failed: .* token 1 of") as caught,
    ):
        llm.generate([[3, 60], [3, 4], [60]], greedy(4), use_tqdm=False)
    assert [one.error is None for one in caught.value.outputs] == [False, True, False]


def test_a_reader_is_told_and_the_other_streams_go_on():
    llm = engine(BY_LAYERS, "ngram")
    [want] = ids(run(llm, [[3, 4]], greedy(NUM_TOKENS)))
    token = min({*range(6, 60)} - {*want})

    async def main() -> None:
        async with AsyncEngine(llm.engine) as streams:

            async def read(name: str, prompt: list[int], n: int) -> RequestOutput:
                params = greedy(NUM_TOKENS, n=n)
                return [one async for one in streams.generate(name, prompt, params)][-1]

            good, bad = await asyncio.gather(
                read("good", [3, 4], 1), read("bad", [3, token], 2), return_exceptions=True
            )
            assert isinstance(bad, GenerationError)
            assert isinstance(good, RequestOutput)
            assert good.outputs[0].token_ids == want

    with broken(llm, token):
        asyncio.run(main())
    llm.engine.check_invariants()
    assert not llm.engine.has_work
