"""A step in which nobody drafts is the step of an engine without a drafter, counted.

The kernels of both engines are wrapped: every call of an operation, of a pass of a network, and of
a product of a network is counted, with the sizes of what it is given.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from outdraft.control.policy import FixedLength
from outdraft.core.plan import StepPlan
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM
from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.decoder_ops import DecoderPass, StepTask
from outdraft.kernels.ops import Kernels
from outdraft.loading import models as loading
from outdraft.loading.models import load_models
from tests.oracle.engines import HOST, NETWORKS, config, prompts_of, run, speculation

FAMILY = "llama-llama3-rope"
LENGTHS = (5, 30, 17)
# Not called by steps of networks.
OBJECTS = ("name", "warm_ups", "attention", "ngram_texts", "suffix_texts")


class Calls:
    """Calls since the last look."""

    def __init__(self) -> None:
        self.counts = Counter[tuple[object, ...]]()

    def take(self) -> Counter[tuple[object, ...]]:
        counts, self.counts = self.counts, Counter()
        return counts

    def wrapped(self, name: str, called: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            sizes = tuple(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))
            taps = args[3] if name == "pass" and len(args) > 3 else ()
            self.counts[name, sizes, taps] += 1
            made = called(*args, **options)
            if name == "compile_decoder":
                return CountedPass(self, made)
            return self.wrapped("product", made) if name == "pack_linear" else made

        for attribute in ("format", "nbytes"):
            if hasattr(called, attribute):
                setattr(counted, attribute, getattr(called, attribute))
        return counted

    def kernels(self, *args: Any, **options: Any) -> Kernels:
        """As `choose_kernels`."""
        chosen = choose_kernels(*args, **options)
        names = [field.name for field in fields(Kernels) if field.name not in OBJECTS]
        return replace(chosen, **{n: self.wrapped(n, getattr(chosen, n)) for n in names})


class CountedPass:
    """A network's passes."""

    def __init__(self, calls: Calls, passes: DecoderPass) -> None:
        self._passes = calls.wrapped("pass", passes)
        self.logits = calls.wrapped("logits", passes.logits)
        self.best_tokens = calls.wrapped("best_tokens", passes.best_tokens)
        self.fused = None
        if passes.fused is not None:
            self.fused, self.draft = self, calls.wrapped("draft", passes.fused.draft)

    def step(self, task: StepTask) -> None:
        """Part by part, which are counted."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._passes(*args, **options)


def tables_of(llm: LLM) -> list[list[int]]:
    """Blocks of each running request."""
    scheduler = llm.engine.scheduler
    return [scheduler.table(request).ids for request in scheduler.running]


class Counted:
    """An engine, the calls of each of its steps, and the blocks that it holds behind each."""

    def __init__(self, method: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        calls, self.steps = Calls(), list[Counter[tuple[object, ...]]]()
        self.num_blocks: list[int] = []
        monkeypatch.setattr(loading, "choose_kernels", calls.kernels)
        given = {} if method == "plain" else options
        speculative = speculation(FAMILY, method, 3)
        # All prompts fit into the first step; each token has a block of its own.
        # With a prefix cache EAGLE reads all prompts: others may share their beginnings.
        sizes = {"max_num_batched_tokens": 64, "block_size": 1, "num_blocks": 400}
        settings = sizes | {"enable_prefix_caching": False}
        speculative = None if speculative is None else speculative | given
        chosen = config(FAMILY, speculative, kernels="reference", **settings)
        self.llm = LLM.from_config(chosen, load_models(chosen))
        launch = self.llm.engine.runner.launch

        def counted(plan: StepPlan) -> Any:
            self.num_blocks.append(sum(map(len, tables_of(self.llm))))
            assert not plan.keeps_states
            calls.take()
            pending = launch(plan)
            self.steps.append(calls.take())
            return pending

        self.llm.engine.runner.launch = counted


def params(**changes: Any) -> list[SamplingParams]:
    common = {"max_tokens": 12, "ignore_eos": True, **changes}
    return [SamplingParams(temperature=t, **common) for t in (0.0, 1.0, 0.7)]


OFF = "the controller is off"
HARD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the engine, of requests
    "every request forbids it": ({}, {"speculation": {"enabled": False}}),
    "the batch is too large": ({"disable_by_batch_size": 2}, {}),
}


@pytest.mark.parametrize(
    ("method", "way"),
    [
        *((method, OFF) for method in (*NETWORKS, *HOST)),
        *((method, way) for method in ("pard", "eagle3-tree", "mlp_speculator") for way in HARD),
    ],
)
def test_a_step_without_drafts_calls_what_a_step_of_an_engine_without_a_drafter_calls(
    method: str, way: str, monkeypatch: pytest.MonkeyPatch
):
    options, changes = HARD.get(way, ({}, {}))
    plain = Counted("plain", monkeypatch)
    other = Counted(method, monkeypatch, **options)
    if way == OFF:
        other.llm.engine.drafting.control = FixedLength(0)
    for one in (plain, other):
        run(one.llm, prompts_of(LENGTHS), params(**changes))
    assert len(plain.steps) == 12
    assert other.steps == plain.steps
    assert other.num_blocks == plain.num_blocks


def test_the_count_sees_a_step_that_drafts(monkeypatch: pytest.MonkeyPatch):
    """Else it would prove nothing."""
    plain, other = Counted("plain", monkeypatch), Counted("draft_model", monkeypatch)
    other.llm.engine.drafting.control = FixedLength(2)
    for one in (plain, other):
        run(one.llm, prompts_of(LENGTHS), params())
    assert other.steps[1] != plain.steps[1]
    assert other.num_blocks[1] > plain.num_blocks[1]
