"""What the host takes in a step, apart from the runner: booking, and looking for drafts."""

import time
from dataclasses import replace
from statistics import median

import numpy as np

from outdraft.config.engine import EngineConfig
from outdraft.core.draft import DraftAsk
from outdraft.core.plan import StepResult, WorkResult
from outdraft.core.request import Request
from outdraft.core.sampling import SamplingParams
from outdraft.engine.drafters import host_proposers
from outdraft.kernels.ops import Kernels
from outdraft.kv.block_pool import BlockPool
from outdraft.scheduling.scheduler import Scheduler

TURNS = 9
PROMPT, TEXT, PERIOD = 16, 256, 61  # tokens
MOST_DRAFTS = 8


def booking_s(config: EngineConfig, num_requests: int) -> float:
    """Scheduling and committing a plain step, by a scheduler of its own."""
    length = PROMPT + TURNS + 2
    cache = replace(config.cache, enable_prefix_caching=False)
    blocks = num_requests * -(-length // cache.block_size)
    limits = replace(
        config.scheduler,
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * PROMPT,
        max_waiting=num_requests,
    )
    scheduler = Scheduler(limits, cache, BlockPool(blocks), length)
    params = SamplingParams(max_tokens=None)
    for index in range(num_requests):
        ids = range(PROMPT)
        scheduler.add(Request(str(index), ids, params, seed=0, max_model_len=length))
    result = StepResult((WorkResult(token_ids=(0,)),) * num_requests, num_requests)
    times_s: list[float] = []
    for _ in range(1 + TURNS):
        started_s = time.perf_counter()
        scheduler.commit(scheduler.schedule({}), result)
        times_s.append(time.perf_counter() - started_s)
    return median(times_s[1:])  # the first one read the prompts


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
