"""What is done once for a prompt is not done again for each of its sequences."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from outdraft.core.plan import StepPlan
from outdraft.engine.llm import LLM
from tests.oracle.engines import engine, greedy, ids, prompts_of, run, tokenizer

PROMPT = prompts_of([45])[0]
TEXT = "w5 w6 w7"


def prompt_rows(llm: LLM, prompts: list[list[int]], params: Any) -> int:
    """Rows of prompts that the target computes."""
    rows: list[int] = []
    launch = llm.engine.runner.launch

    lengths: dict[int, int] = {}  # by slot

    def counting(plan: StepPlan):
        lengths.update({one.slot: one.num_prompt for one in plan.admissions})
        for work in plan.works:
            num_left = lengths[work.slot] - work.start
            rows.append(max(0, min(work.num_new, num_left)))
        return launch(plan)

    llm.engine.runner.launch = counting
    run(llm, prompts, params)
    return sum(rows)


@pytest.mark.parametrize("max_num_batched_tokens", [24, 200])
@pytest.mark.parametrize("method", ["plain", "combined"])
def test_n_sequences_read_their_prompt_once_and_its_last_block_each(
    method: str, max_num_batched_tokens: int
):
    options = {"max_num_batched_tokens": max_num_batched_tokens, "block_size": 4}
    one = prompt_rows(engine("qwen2", method, **options), [PROMPT], greedy(6))
    four = prompt_rows(engine("qwen2", method, **options), [PROMPT], greedy(6, n=4))
    assert one == len(PROMPT)
    assert four == one + 3 * (len(PROMPT) - 44)


def test_prompts_with_a_common_beginning_read_it_once():
    llm = engine("qwen2", "plain", max_num_batched_tokens=200, block_size=4)
    prompts = [PROMPT[:40] + [token] * 3 for token in (5, 6, 7)]
    assert prompt_rows(llm, prompts, greedy(6)) == 43 + 2 * 3


def test_sequences_that_took_over_a_prompt_say_what_those_that_read_it_say():
    plain = engine("qwen2", "plain", enable_prefix_caching=False)
    params = greedy(8, n=3)
    want = ids(run(plain, [PROMPT, PROMPT[:9]], params))
    sharing = engine("qwen2", "combined", block_size=4)
    assert ids(run(sharing, [PROMPT, PROMPT[:9]], params)) == want


def test_the_log_probabilities_of_a_prompt_are_computed_once_for_n_sequences():
    llm = engine("qwen2", "plain", block_size=4, max_num_batched_tokens=200)
    computed: list[int] = []
    collect = llm.engine.runner.collect

    def counting(pending):
        result = collect(pending)
        computed.extend(len(work.prompt_logprobs) for work in result.works)
        return result

    llm.engine.runner.collect = counting
    params = greedy(4, n=3, prompt_logprobs=1)
    assert prompt_rows(llm, [PROMPT], params) == len(PROMPT) + 2
    assert sum(computed) == len(PROMPT) - 1
    (alone,) = run(engine("qwen2", "plain"), [PROMPT], greedy(4, prompt_logprobs=1))
    (again,) = run(llm, [PROMPT], params)  # what the cache knows by now is computed again
    for got, want in zip(again.prompt_logprobs, alone.prompt_logprobs, strict=True):
        assert (got and list(got)) == (want and list(want))


def test_a_text_is_made_ids_of_once_and_the_output_shows_it(monkeypatch):
    llm = engine("qwen2", "plain")
    encoded: list[str] = []
    encode = llm.engine.inputs.encode

    def counting(text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr(llm.engine.inputs, "encode", counting)
    texts = [TEXT, "w8 w9"]
    outputs = llm.generate(texts, greedy(3, n=2), use_tqdm=False)
    assert encoded == texts
    assert [output.prompt for output in outputs] == texts
    words: Tokenizer = tokenizer()
    assert [o.prompt_token_ids for o in outputs] == [words.encode(text).ids for text in texts]


def test_a_checked_prompt_is_taken_as_it_is():
    core = engine("qwen2", "plain").engine
    encoded = core.check_request([5, 6], greedy(2))
    assert core.check_request(encoded, greedy(2)) is encoded
    assert (encoded.text, encoded.token_ids.tolist()) == (None, [5, 6])
    assert not core.has_work
