"""What the host takes in a step, apart from the runner: booking, and looking for drafts."""

import time
from dataclasses import replace
from statistics import median

import numpy as np

from outdraft.config.engine import EngineConfig
from outdraft.core.draft import Draft, DraftAsk, DraftSource
from outdraft.core.plan import DraftChoice, PhaseTimes, StepResult, WorkResult
from outdraft.core.request import Request
from outdraft.core.sampling import SamplingParams
from outdraft.engine.deltas import RequestDeltas, StepTold
from outdraft.engine.drafters import host_proposers
from outdraft.engine.stats import StatsTotal, step_stats
from outdraft.kernels.ops import Kernels
from outdraft.kv.block_pool import BlockPool
from outdraft.scheduling.scheduler import Scheduler

TURNS = 9
PROMPT, TEXT, PERIOD = 16, 256, 61  # tokens
CACHE_BYTES = 2 << 20  # what a core keeps for itself
MOST_DRAFTS = 8


def booking_s(config: EngineConfig, num_requests: int, num_drafts: int = 0) -> float:
    """Scheduling, committing and telling a step, by a scheduler of its own.

    The caches of the processor are full of something else, as they are behind a pass.

    Args:
        num_drafts: of each request; half of them are accepted.
    """
    length = PROMPT + (TURNS + 1) * (1 + num_drafts) + 1
    cache = replace(config.cache, enable_prefix_caching=False)
    blocks = num_requests * -(-length // cache.block_size)
    limits = replace(
        config.scheduler,
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * max(PROMPT, 1 + num_drafts),
        max_waiting=num_requests,
    )
    scheduler = Scheduler(limits, cache, BlockPool(blocks), length)
    params = SamplingParams(max_tokens=None)
    deltas: dict[str, RequestDeltas] = {}
    for name in map(str, range(num_requests)):
        scheduler.add(Request(name, range(PROMPT), params, seed=0, max_model_len=length))
        deltas[name] = RequestDeltas(name, [name], num_drafts, lossless=True)
    scheduler.commit(scheduler.schedule({}), _result(num_requests, 0))  # the prompts
    choices: dict[str, DraftChoice] = {}
    if num_drafts:
        choice = DraftChoice(DraftSource.SUFFIX, Draft.chain(range(num_drafts)))
        choices = dict.fromkeys(deltas, choice)
    result, total = _result(num_requests, num_drafts), StatsTotal()
    other = np.zeros(CACHE_BYTES, np.uint8)
    times_s: list[float] = []
    for _ in range(TURNS):
        other += 1
        started_s = time.perf_counter()
        step = scheduler.schedule(choices)
        booked = scheduler.commit(step, result)
        for one in booked:
            deltas[one.request.id].add(0, one, StepTold(0.0, None, choices))
        stats = step_stats(
            step.plan,
            booked,
            num_rows=step.plan.num_rows,
            times=PhaseTimes(),
            step_s=0.0,
            num_waiting=0,
            kv_usage=scheduler.pool.usage,
            granted=choices,
        )
        total.add(stats)
        for one in deltas.values():
            one.take()
        times_s.append(time.perf_counter() - started_s)
    return median(times_s)


def _result(num_requests: int, num_drafts: int) -> StepResult:
    """What a step brings in which each request had so many drafts."""
    kept, chain = num_drafts // 2, tuple(range(num_drafts))
    rows = tuple(range(1, 1 + kept))
    one = WorkResult(
        (0,) * (1 + kept), accepted_rows=rows, drafted_ids=chain, drafted_parents=chain
    )
    return StepResult((one,) * num_requests, num_requests)


def offer_s(config: EngineConfig, kernels: Kernels) -> float:
    """What the sources of the host take to look for a draft behind one more token of a text."""
    proposers = host_proposers(config.speculation.sources, kernels)
    text = (np.arange(TEXT + TURNS) % PERIOD).astype(np.int32)
    times_s: list[float] = []
    for more in range(1 + TURNS):
        ask = DraftAsk("", text[: TEXT + more], MOST_DRAFTS)
        started_s = time.perf_counter()
        for proposer in proposers:
            proposer.propose([ask])
        times_s.append(time.perf_counter() - started_s)
    for proposer in proposers:
        proposer.finish("", None)
    return median(times_s[1:])
