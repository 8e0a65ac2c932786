"""Steps of runners whose tensors are on the meta device, with the kernels of a GPU.

The models are small: 3 layers. So a step has fewer launches for layers than that of a real model,
and as many for all else.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from outdraft.config.engine import SchedulerConfig
from outdraft.core.draft import Draft, DraftSource
from outdraft.core.grammar import AllowedTokens
from outdraft.core.plan import Admission, DraftChoice, StepPlan, TokenRules, Work
from outdraft.core.sampling import SamplingParams
from outdraft.core.structured_outputs import StructuredOutput
from outdraft.kernels.choose import choose_kernels, with_triton
from outdraft.kernels.ops import Kernels
from outdraft.kernels.triton import graphs
from outdraft.loading import models as loading
from outdraft.runner.dummy_steps import DummyStep, DummySteps
from outdraft.runner.model_runner import LaunchedStep, ModelRunner
from outdraft.runner.verified_parts import PartVerifier
from tests.gpu_budget.meta_device import CHOOSE, DRAFT, META, PASS, Counts, Device, moved
from tests.oracle import engines
from tests.oracle.engines import VOCAB_SIZE

MOST_REQUESTS, NUM_DRAFTS, BLOCK_SIZE, CHUNK = 64, 3, 16, 12
LIMITS = SchedulerConfig(max_num_seqs=MOST_REQUESTS + 1, max_num_batched_tokens=2048)
HOST_TREE = DraftChoice(DraftSource.NGRAM, Draft((5, 6, 7), (0, 0, 1)))
STOP_IDS, BAD_WORDS = (1,), ((1, 2),)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=0.8, top_k=20),
    "cut": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
    "seeded": SamplingParams(temperature=1.0, seed=7),
    "penalties": SamplingParams(temperature=1.0, presence_penalty=0.5, repetition_penalty=1.2),
    "limits": SamplingParams(
        temperature=0.0, min_tokens=4, logit_bias={3: 1.0}, allowed_token_ids=list(range(40))
    ),
    "bad words": SamplingParams(temperature=1.0, bad_words=["any"]),
    "grammar": SamplingParams(temperature=1.0, structured=StructuredOutput("regex", "a*")),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3),
    "prompt logprobs": SamplingParams(temperature=0.0, prompt_logprobs=3),
}


class Case(NamedTuple):
    """A step.

    Attributes:
        has_graphs: passes, drafts and choices are CUDA graphs, which earlier steps have made.
        kind: "usual"; "chunk": a chunk of a prompt besides; "live": live rules report margins;
            "idle": one request has no drafts; "long": of one long text.
        options: of the speculative configuration.
    """

    family: str
    method: str
    sampling: str = "greedy"
    num_requests: int = 2
    has_graphs: bool = False
    kind: str = "usual"
    options: tuple[tuple[str, Any], ...] = ()


def counts_of(case: Case) -> Counts:
    """Launch a step like others before it, and count."""
    device = Device()
    runner = _runner(case, device)
    plan = _plan(case, runner)
    again = replace(plan, admissions=(), works=tuple(map(_without_news, plan.works)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartVerifier, "verified", device.during(CHOOSE, PartVerifier.verified))
        for earlier in [plan, again] if case.has_graphs else [plan]:
            with device.running():
                _launch(runner, earlier)
        with device.running() as counts:
            _launch(runner, again)
    return counts


def _launch(runner: ModelRunner, plan: StepPlan) -> None:
    step = runner.launch(plan)
    if isinstance(step, LaunchedStep):  # it has grammars
        num_rows = sum(1 + work.num_drafts for work in step.works)
        masks_RW = np.full((num_rows, -(-VOCAB_SIZE // 32)), -1, dtype=np.int32)
        runner.verify(step, AllowedTokens(masks_RW, np.zeros((2, 0), dtype=np.int64)))


def _runner(case: Case, device: Device) -> ModelRunner:
    """A runner that reports its phases to the device.

    Models are loaded on the CPU, where parts of them are compared with what replaces them, and
    moved then.
    """
    speculative = engines.speculation(case.family, case.method, NUM_DRAFTS)
    if speculative is not None:
        speculative |= dict(case.options)
    config = engines.config(
        case.family,
        speculative,
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        block_size=BLOCK_SIZE if case.kind != "long" else 4,
        dtype="bfloat16",
    )

    def gpu_kernels(*_: object, **__: object) -> Kernels:
        on_device = choose_kernels("auto", META, torch.bfloat16)
        return with_triton(on_device, has_graphs=case.has_graphs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "choose_kernels", gpu_kernels)
        patch.setattr(graphs, "DeviceCapture", lambda: device.capture)
        models = moved(loading.load_models(config))
    runner = loading.build_runner(models, num_blocks=6 * LIMITS.max_num_seqs)
    model: Any = runner.model
    model.forward_tapped = device.during(PASS, model.forward_tapped)
    proposer: Any = runner.proposer
    if proposer is not None:
        proposer.propose = device.during(DRAFT, proposer.propose)
        proposer.drafter.keep = device.during(DRAFT, proposer.drafter.keep)
    return runner


def _plan(case: Case, runner: ModelRunner) -> StepPlan:
    """The first step of requests that all draft, if the method does."""
    steps = DummySteps(runner, LIMITS, runner.model.config.max_model_len)
    proposer, num_drafts = runner.proposer, 0 if case.method == "plain" else NUM_DRAFTS
    is_network, is_tree = proposer is not None, case.method.endswith("-tree")
    if proposer is not None:
        num_drafts = proposer.max_drafts if is_tree else min(NUM_DRAFTS, proposer.max_chain)
    num_idle = int(case.kind == "idle")
    step = DummyStep(
        case.num_requests,
        case.num_requests + (case.num_requests - num_idle) * num_drafts,
        is_network=is_network,
        is_tree=is_network and is_tree,
        is_long=case.kind == "long",
        num_idle=num_idle,
        tells_margins=case.kind == "live",
    )
    plan, params = steps._plan(step), SAMPLINGS[case.sampling]
    works, admissions = list(plan.works), [*plan.admissions]
    if is_tree and not is_network:
        works = [work._replace(drafts=HOST_TREE) for work in works]
    if case.kind == "chunk":
        slot, blocks = case.num_requests, range(5 * MOST_REQUESTS, 5 * MOST_REQUESTS + 2)
        text = np.arange(2 * CHUNK, dtype=np.int32)
        num_read = CHUNK - 1 if plan.keeps_states else 0
        works.append(Work(slot, 0, CHUNK, False, None, 0, tuple(blocks), num_drafter_new=num_read))
        admissions.append(Admission(slot, text, len(text), TokenRules(params, seed=slot)))
    stop_ids = STOP_IDS if params.min_tokens else ()
    bad_words = BAD_WORDS if params.bad_words else ()
    for place, one in enumerate(admissions):
        rules = TokenRules(params, one.slot, stop_ids, bad_words)
        admissions[place] = replace(one, rules=rules)
    return replace(plan, works=tuple(works), admissions=tuple(admissions))


def _without_news(work: Work) -> Work:
    return work._replace(num_kept_blocks=len(work.new_block_ids), new_block_ids=())
