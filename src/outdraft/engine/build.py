"""Builds an engine that is ready to step from a configuration.

On a GPU it makes CUDA graphs for common steps, before the first request would wait for them. A
graph takes 10 to 60 ms to make, 10 times as long as the step that it replays. Numbers of rows and
requests are rounded up (kernels/data/graph_sizes.py), so that few steps need most of the graphs
that a batch goes through while its requests end one by one. Longer texts, more requests, and
parameters that filter or penalize tokens get theirs when they come.
"""

import logging
import time
from collections.abc import Iterator

from outdraft.config.engine import EngineConfig
from outdraft.control.controller import Controller
from outdraft.control.policy import FixedLength, LengthPolicy
from outdraft.core.draft import MAX_DRAFTS
from outdraft.core.errors import ConfigError
from outdraft.core.sampling import SamplingParams
from outdraft.costs.table import AUTO, cost_file, cost_table
from outdraft.drafting.device.live_stop import host_sees
from outdraft.drafting.device.proposer import DeviceProposer
from outdraft.drafting.policy import DraftPolicy
from outdraft.drafting.request_limits import DrafterLimits
from outdraft.engine.engine import Engine
from outdraft.engine.inputs import InputProcessor
from outdraft.kernels.choose import has_graphs
from outdraft.kernels.data.graph_sizes import rounded_requests, rounded_rows
from outdraft.kernels.data.logits import most_drawn
from outdraft.kv.block_pool import BlockPool
from outdraft.loading.memory import MemoryPlan, plan_memory
from outdraft.loading.methods import host_proposers
from outdraft.loading.models import LoadedModels, build_runner, stage
from outdraft.ranks.launch import load_on_ranks
from outdraft.runner.dummy_steps import DummyStep, DummySteps
from outdraft.runner.parallel_runner import StepRunner
from outdraft.scheduling.scheduler import Scheduler

WARM_UP_TOKENS, WARM_UP_STEPS = 4, 4  # of the prompt; its own step, then 3 with drafts
MOST_S = 15.0  # to make graphs
MOST_REQUESTS, MOST_DRAFTS = 32, 8  # of the steps that graphs are made for
ALL_READ = -1  # num_unread after a step whose last draft was not accepted
_logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig, models: LoadedModels | None = None, memory: MemoryPlan | None = None
) -> tuple[Engine, MemoryPlan]:
    """Build an engine that has all its memory; return it with the account of that memory.

    Args:
        memory: its part, from `plan_together`; None: it is the only engine. On several ranks it
            must be.

    Raises:
        ConfigError: no such engine can be built, or its memory is not there.
        RanksError: another rank ended.
    """
    models = (models or load_on_ranks(config)).as_used_by(config)
    if models.processes is not None and memory is not None:
        raise ConfigError("engines that live at once need tensor_parallel_size=1")
    speculation, target, processes = config.speculation, models.target, models.processes
    if processes is not None:
        memory = processes.plan_together(config, lambda: plan_memory(config, models))
        processes.build(memory.num_blocks)
    if memory is None:
        with stage("planned the memory"):
            memory = plan_memory(config, models)
    own = build_runner(models, memory.num_blocks)
    runner = own if processes is None else processes.runner(own, models)
    if has_graphs(models.kernels) and models.ranks.target.size == 1:
        make_graphs(config, runner)
    drafter, num_groups = models.drafter, models.ranks.num_draft_groups
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        BlockPool(memory.num_blocks, num_groups),
        models.longest_text,
        state_window=drafter.state_window if drafter is not None else 0,
        drafter_max_kept=own.proposer.drafter.max_kept if own.proposer is not None else None,
        drafter_shares_cache=drafter is not None and drafter.shares_cache,
        num_draft_groups=num_groups,
    )
    inputs = InputProcessor(
        models.tokenizer,
        vocab_size=target.config.vocab_size,
        max_model_len=scheduler.max_model_len,
        eos_token_ids=target.config.eos_token_ids,
        seed=config.seed,
    )
    policy = DraftPolicy(
        speculation,
        host_proposers(speculation.sources, models.kernels),
        _drafter_limits(models, own.proposer, scheduler),
        _control(config, models, runner),
        config.scheduler.max_num_seqs,
    )
    return Engine(inputs, scheduler, policy, runner, ranks=processes), memory


def check_longest_text(engine: Engine, memory: MemoryPlan) -> None:
    """Raise ConfigError if no request as long as max_model_len could ever run: most have no limit
    of their own, so a server would refuse them all."""
    longest, held = engine.inputs.max_model_len, memory.num_blocks * memory.block_size
    if longest > held:
        raise ConfigError(
            f"a text of max_model_len={longest} tokens does not fit into the KV cache, which holds "
            f"{held}: lower max_model_len, or raise kv_cache_memory_bytes or gpu_memory_utilization"
        )


def make_graphs(config: EngineConfig, runner: StepRunner) -> None:
    """Run the common steps, greedy and at temperature 1, of an engine that has no requests yet;
    none begins later than MOST_S seconds after the first."""
    end_s = (started_s := time.perf_counter()) + MOST_S
    max_model_len, number = runner.state.row_len - 1, 0
    for temperature in (0.0, 1.0):
        steps = DummySteps(
            runner, config.scheduler, max_model_len, most_long=1, temperature=temperature
        )
        for step in common_steps(config, runner, steps):
            if time.perf_counter() > end_s:
                _logger.info("no time is left for graphs: others are made when they are needed")
                return
            steps.run(step)
            number += 1
    _logger.info("made graphs for %d steps in %.1f s", number, time.perf_counter() - started_s)


def common_steps(
    config: EngineConfig, runner: StepRunner, scratch: DummySteps
) -> Iterator[DummyStep]:
    """Yield steps that fit: for each number of requests up to MOST_REQUESTS, each number of drafts
    for all of them or for all but one, and each number of rows of the target."""
    most, proposer = 0, runner.proposer
    if config.speculation.sources:
        most = min(config.speculation.max_drafts, MOST_DRAFTS)
    if proposer is not None:
        most = min(most, proposer.max_chain)
    counts = range(1, min(MOST_REQUESTS, scratch.max_requests) + 1)
    passes = set[tuple[int, int]]()
    for count in {rounded_rows(count): count for count in counts}.values():
        for step in filter(scratch.fits, _grown(config, proposer, count, most)):
            passes.add(_sizes(step))
            yield step
    for count in counts:
        for rows in range(count, count * (1 + most) + 1):
            step = DummyStep(count, rows, is_network=proposer is not None and rows > count)
            if _sizes(step) not in passes and scratch.fits(step):
                passes.add(_sizes(step))
                yield step


def _grown(
    config: EngineConfig, proposer: DeviceProposer | None, count: int, most: int
) -> Iterator[DummyStep]:
    """Yield a plain step of `count` requests, and one for each number of drafts up to `most`."""
    yield DummyStep(count, count)
    for depth in range(1, most + 1):
        step = DummyStep(count, count * (1 + depth), is_network=proposer is not None)
        yield step
        if proposer is not None and config.speculation.control != "fixed":
            yield step._replace(tells_margins=True)
        if proposer is not None and count > 1:
            yield step._replace(num_rows=step.num_rows - depth, num_idle=1)
    if proposer is None or not most:
        return
    # A network that reads states reads accepted tokens except the newest, whose successor is not
    # there yet. Others read the newest 1 or 2.
    for num_unread in range(1, most + 1) if proposer.drafter.state_window else (ALL_READ,):
        yield DummyStep(count, 2 * count, is_network=True, num_unread=num_unread)
    if proposer.shapes[0]:
        yield DummyStep(count, count * (1 + proposer.max_drafts), is_network=True, is_tree=True)


def _sizes(step: DummyStep) -> tuple[int, int]:
    """The target's pass after rounding: requests, rows."""
    return rounded_requests(step.num_requests), rounded_rows(step.num_rows)


def warm_up(engine: Engine) -> None:
    """Touch pages and make kernels ready, so that the first requests need not wait for it.

    Runs a greedy and a sampled request for WARM_UP_STEPS steps, on each draft group. Nothing is
    learned from them. The engine must be idle.
    """
    control, engine.drafting.control = engine.drafting.control, FixedLength(MAX_DRAFTS)
    num_together = min(engine.runner.num_draft_groups, engine.scheduler.config.max_num_seqs)
    size = min(WARM_UP_TOKENS, engine.inputs.max_model_len - 1)
    prompt = [token_id % engine.inputs.vocab_size for token_id in range(size)]
    with stage("warmed up"):
        for temperature in (0.0, 1.0):
            params = SamplingParams(
                temperature=temperature, max_tokens=None, ignore_eos=True, detokenize=False
            )
            # Requests that begin together go to different groups.
            names = [f"warm-up {group}" for group in range(num_together)]
            for name in names:
                engine.add_request(name, prompt, params)
            for _ in range(WARM_UP_STEPS):
                engine.step()
            for name in names:
                engine.abort(name)
    engine.drafting.control = control


def _drafter_limits(
    models: LoadedModels, proposer: DeviceProposer | None, scheduler: Scheduler
) -> DrafterLimits | None:
    config, drafter, target = models.config.speculation.network, models.drafter, models.target
    if config is None or drafter is None or proposer is None:
        return None
    longest = drafter.layers.max_model_len if drafter.layers else target.config.max_model_len
    return DrafterLimits(
        min(config.max_model_len or longest, longest),
        proposer.drafter.source,
        proposer.shapes,
        max_drafts=proposer.max_drafts,
        unread_tokens=scheduler.unread_tokens,
        max_chain=proposer.max_chain,
        ends_live=host_sees(target.device),
        most_drawn=most_drawn(target.config.vocab_size, target.device),
    )


def _control(config: EngineConfig, models: LoadedModels, runner: StepRunner) -> LengthPolicy:
    """Make the policy that decides lengths; no request drafts more than it allows."""
    if config.speculation.control == "fixed" or not config.speculation.sources:
        return FixedLength(MAX_DRAFTS)
    table = cost_table(config, models, runner)
    forget = cost_file(config, models, runner).forget if config.cost_table == AUTO else None
    return Controller(table, config.speculation.max_drafts, forget)
