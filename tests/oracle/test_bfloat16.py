"""In bfloat16 texts are the same with and without speculation, alone and in a batch, on a CPU."""

import pytest

from outdraft.core.sampling import SamplingParams
from tests.oracle.engines import METHODS, engine, greedy, ids, prompts_of, run, with_kernels

LENGTHS = (6, 25, 38, 3, 50)
INVARIANT = {"rejection_sample_method": "drafter_invariant"}


@pytest.mark.parametrize(("method", "kernels"), with_kernels(METHODS, ["draft_model-tree"]))
def test_every_method_answers_what_plain_decoding_does(method: str, kernels: str):
    prompts, options = prompts_of(LENGTHS), {"dtype": "bfloat16", "kernels": kernels}
    plain = run(engine("qwen2", "plain", **options), prompts, greedy(24))

    drafted = run(engine("qwen2", method, **options), prompts, greedy(24))

    assert ids(drafted) == ids(plain)


@pytest.mark.parametrize("method", ["ngram", "draft_model", "draft_model-tree", "combined"])
def test_with_shared_noise_so_does_a_sampled_text(method: str):
    params = SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True)
    prompts = prompts_of(LENGTHS)
    plain = run(engine("qwen2", "plain", dtype="bfloat16"), prompts, params)

    drafted = run(engine("qwen2", method, dtype="bfloat16", **INVARIANT), prompts, params)

    assert ids(drafted) == ids(plain)


def test_a_batch_answers_what_each_text_alone_does():
    prompts = prompts_of(LENGTHS)
    alone = run(engine("qwen2", "plain", dtype="bfloat16", max_num_seqs=1), prompts, greedy(24))

    together = run(engine("qwen2", "plain", dtype="bfloat16", max_num_seqs=5), prompts, greedy(24))

    assert ids(together) == ids(alone)
