"""Speculation keeps the prefix cache: each request finds as many tokens in it as without drafts.

The requests share prefixes of every length around the edges of blocks, with texts that go on
otherwise; and conversations come back, each with the answer it got and one more question. All run
at temperature 0, so that engines with and without drafts have the same texts.
"""

from functools import cache

import numpy as np
import pytest

from outdraft import assets
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.policy import DraftPolicy
from outdraft.engine.llm import LLM
from outdraft.kv.block_pool import extend_hashes
from tests.oracle.engines import engine, greedy, ids, prompts_of, run, with_kernels

FAMILY = "llama-llama3-rope"
BLOCK_SIZE = 4
COMMON = prompts_of([14], seed=3)[0]  # what all texts of a wave begin with, or a part of it
TURNS = 4
METHODS = (
    "suffix",
    "draft_model",
    "draft_model-tree",
    "eagle",
    "eagle-tree",
    "eagle3",
    "p-eagle",
    "medusa",
    "dflash",
    "combined-eagle3",
)


def waves() -> list[list[list[int]]]:
    """Requests of waves that run together: shared beginnings, then texts that part there."""
    single = [[COMMON]]
    parting = [[*COMMON[:length], 40 + length, 7, 8, 9] for length in range(2, 15)]
    again = [[*COMMON[:length], 20 + length, 7, 8, 9] for length in range(2, 15)]
    together = [again[:6], again[6:]]
    return [*single, *[[one] for one in parting], *together]


def hits(llm: LLM) -> list[int]:
    """Cached tokens of every request, in the order in which they were asked."""
    found = list[int]()
    for wave in waves():
        found += [one.num_cached_tokens for one in run(llm, wave, greedy(6))]
    texts = prompts_of((5, 9, 16), seed=4)
    for turn in range(TURNS):
        outputs = run(llm, texts, greedy(5 + turn))
        found += [one.num_cached_tokens for one in outputs]
        texts = [
            [*text, *answer, 30 + turn, 11, 12]
            for text, answer in zip(texts, ids(outputs), strict=True)
        ]
    return found


def small_blocks(method: str, kernels: str = "auto") -> LLM:
    return engine(FAMILY, method, block_size=BLOCK_SIZE, num_blocks=600, kernels=kernels)


@cache
def plain_hits(kernels: str = "auto") -> list[int]:
    return hits(small_blocks("plain", kernels))


def test_prefixes_are_found_where_they_are_shared():
    found = plain_hits()
    num_waves = 1 + 13
    # The first one finds nothing, each of the next all full blocks that it shares with it.
    assert found[:num_waves] == [0, *[n // BLOCK_SIZE * BLOCK_SIZE for n in range(2, 15)]]
    assert found[-1] > found[-4] > found[-7] > 0


@pytest.mark.parametrize(("method", "kernels"), with_kernels(METHODS, ["draft_model"]))
def test_every_request_finds_as_many_tokens_with_drafts_as_without(method: str, kernels: str):
    assert hits(small_blocks(method, kernels)) == plain_hits(kernels)


def known_blocks(llm: LLM, text: list[int]) -> int:
    """Leading blocks of a text that the next request would find."""
    names = list[bytes]()
    extend_hashes(names, np.array(text, np.int32), BLOCK_SIZE, len(text))
    pool = llm.engine.scheduler.pool
    return next((i for i, name in enumerate(names) if pool.find(name) is None), len(names))


@pytest.mark.parametrize("method", METHODS)
def test_all_of_a_text_that_was_read_stays_known(method: str):
    llm = small_blocks(method)
    prompts = prompts_of((3, 9, 17, 20), seed=5)
    for prompt, answer in zip(prompts, ids(run(llm, prompts, greedy(13))), strict=True):
        text = [*prompt, *answer]
        assert known_blocks(llm, text) == (len(text) - 1) // BLOCK_SIZE


@pytest.mark.skipif("eagle3" not in assets.available_heads(), reason="no embedded EAGLE-3 head")
@pytest.mark.parametrize("reads_prompts", [True, False])  # False: while drafts are only tried
@pytest.mark.parametrize("adds", ["", "    # and more\n"])
def test_acceptance_is_the_same_behind_a_prefix_that_a_request_without_drafts_has_cached(
    reads_prompts, adds, monkeypatch
):
    monkeypatch.setattr(DraftPolicy, "reads_prompts", lambda *_: reads_prompts)
    text = assets.prompts()[0][1]
    plain = SamplingParams(temperature=0, max_tokens=4, speculation={"enabled": False})
    drafting = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    counts = list[tuple[str, int, int]]()
    for is_cached in (False, True):
        llm = with_embedded_head("eagle3")
        if is_cached:
            llm.generate(text, plain, use_tqdm=False)
        [output] = llm.generate(text + adds, drafting, use_tqdm=False)
        assert (output.num_cached_tokens > 0) == is_cached
        drafts = output.metrics.speculative_decoding
        counts.append(
            (output.outputs[0].text, drafts.num_draft_tokens, drafts.num_accepted_draft_tokens)
        )
    assert counts[0] == counts[1]


def with_embedded_head(method: str) -> LLM:
    speculative = {
        "method": method,
        "model": str(assets.head_path(method)),
        "num_speculative_tokens": 4,
        "control": "fixed",
    }
    return LLM(
        str(assets.target_path()),
        speculative_config=speculative,
        dtype="float32",
        device="cpu",
        num_blocks=64,
    )
