"""No work is wasted: a perfect drafter takes the fewest steps, and plans are what is computed."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outdraft.runner import model_runner
from tests.oracle.engines import NETWORKS, engine, greedy, passes_of, prompts_of, run


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_a_perfect_drafter_takes_the_fewest_steps(num_drafts: int):
    llm = engine("llama-llama3-rope", "perfect", num_drafts, max_num_batched_tokens=512)
    num_tokens = 25
    (output,) = run(llm, prompts_of([20]), greedy(num_tokens))
    # The first step reads the prompt and yields a token; then num_drafts + 1 tokens a step.
    assert llm.engine.stats.num_steps == 1 + -(-(num_tokens - 1) // (num_drafts + 1))
    assert llm.engine.stats.acceptance_rate == 1.0
    assert output.metrics.speculative_decoding.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("method", ["plain", "ngram", "combined", "eagle3-tree", "medusa"])
def test_rows_computed_are_rows_planned(method: str):
    llm = engine("qwen3-window", method)
    with passes_of(llm) as passes:
        run(llm, prompts_of([12, 30]), greedy(20))
    assert sum(one.num_rows for one in passes) == llm.engine.stats.num_rows
    assert len(passes) == llm.engine.stats.num_steps


def test_plain_decoding_makes_a_state_for_each_token_that_it_chooses():
    llm = engine("qwen3-window", "plain")
    with passes_of(llm) as passes:
        run(llm, prompts_of([12, 30]), greedy(20))
    assert sum(one.num_states for one in passes) == 2 * 20


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator", "eagle3", "eagle", "mtp"])
def test_a_prompt_makes_states_for_those_drafters_only_that_read_them(method: str):
    llm = engine("mimo" if method == "mtp" else "llama-llama3-rope", method)
    with passes_of(llm) as passes:
        run(llm, prompts_of([30]), greedy(4))
    num_read, num_states = map(sum, zip(*passes, strict=True))
    assert num_states == num_read if method in ("eagle", "mtp") else num_states <= num_read - 29


class Waits(TorchDispatchMode):
    """Counts the operations that make the host wait for the device."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0] in self.WAITING:
            self.seen.append(func.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.few(24)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["plain", *NETWORKS, "combined"])
def test_no_operator_of_a_step_reads_a_value_and_one_copy_goes_back(
    method: str, temperature: float, monkeypatch
):
    """What can be seen without a GPU; test_gpu.py lets CUDA itself raise where `launch` waits."""
    llm = engine("qwen2", method, kernels="reference")
    copies = []
    to_host = model_runner.to_host
    monkeypatch.setattr(
        model_runner, "to_host", lambda *args: (copies.append(1), to_host(*args))[1]
    )
    params = greedy(12) if temperature == 0 else _sampled(12)
    with Waits() as waits, torch.inference_mode():
        run(llm, prompts_of([5, 18]), params)
    assert waits.seen == []
    assert len(copies) == llm.engine.stats.num_steps


def _sampled(num_tokens: int):
    from outdraft.core.sampling import SamplingParams

    return SamplingParams(
        temperature=1.0,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        presence_penalty=0.3,
        seed=7,
        max_tokens=num_tokens,
        ignore_eos=True,
    )
