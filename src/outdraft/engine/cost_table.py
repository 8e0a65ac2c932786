"""What steps of an engine cost: a table for the controller, ready before the first request.

It is measured once for each model, machine and network that drafts, in the time that a budget
allows, and kept on disk. Small models take a few tenths of a second; others at most the budget.
"""

import logging
import time
from dataclasses import replace
from pathlib import Path

import torch

from outdraft.config.engine import EngineConfig
from outdraft.control.costs import CostTable, DrafterCost
from outdraft.control.roofline import ROWS, Launches, Machine, PassSize, prior_table
from outdraft.core.errors import ConfigError
from outdraft.engine.cost_cache import CostFile, default_folder, digest, drafter_key, target_key
from outdraft.engine.cost_host import booking_s, offer_s
from outdraft.engine.cost_measurement import (
    DEPTH,
    DrafterSteps,
    TargetSteps,
    request_counts,
    take_turns,
)
from outdraft.engine.cost_steps import LONG, LOOKED_AT, ScratchSteps
from outdraft.engine.drafters import LoadedDrafter
from outdraft.engine.loading import LoadedModels
from outdraft.kv.cache import KVCache
from outdraft.models.base import LanguageModel
from outdraft.models.shape import ModelShape
from outdraft.runner.parallel_runner import StepRunner

AUTO, ROOFLINE = "auto", "roofline"
BUDGET_S, DRAFTER_SHARE = 3.0, 1 / 2
# Machines that nobody has measured: moderate ones.
CPU = Machine(
    bandwidth=20e9,
    peak=100e9,  # of one thread
    call_s=60e-6,
    host_s=120e-6,
    host_request_s=20e-6,
    host_draft_s=80e-6,
)
GPU = Machine(
    bandwidth=1.5e12,
    peak=2e14,
    launches=Launches(floor_s=60e-6),
    call_s=500e-6,
    host_s=500e-6,
    host_request_s=20e-6,
    host_draft_s=100e-6,
)
_logger = logging.getLogger(__name__)


def cost_table(
    config: EngineConfig,
    models: LoadedModels,
    runner: StepRunner,
    *,
    budget_s: float = BUDGET_S,
    folder: Path | None = None,
) -> CostTable:
    """The costs of an engine whose runner is idle and serves nobody yet.

    As `config.cost_table` says: measured (or measured before), from a roofline, or from a file. An
    engine that does not speculate measures nothing.

    Args:
        budget_s: seconds that measuring may take.
        folder: where tables are kept; None: `default_folder()`.

    Raises:
        ConfigError: the configuration names a file without a table.
    """
    prior = roofline(config, models, runner, default_machine(models.device))
    if config.cost_table == ROOFLINE or not config.speculation.sources:
        return prior
    if config.cost_table != AUTO:
        told = read_table(Path(config.cost_table), f"cost_table {config.cost_table!r}")
        return replace(told, drafters=prior.drafters | told.drafters)
    measuring = _Measuring(config, models, runner, prior, budget_s)
    table = measuring.table(cost_file(config, models, runner, folder))
    return replace(table, offer_s=offer_s(config, models.kernels))


def cost_file(
    config: EngineConfig, models: LoadedModels, runner: StepRunner, folder: Path | None = None
) -> CostFile:
    """Where the measured table of an engine is kept."""
    key = target_key(config, models, runner.state.row_len - 1)
    return CostFile(folder or default_folder(), key)


def roofline(
    config: EngineConfig, models: LoadedModels, runner: StepRunner, machine: Machine
) -> CostTable:
    """The prior of an engine, see control/roofline.py."""
    rows = [count for count in ROWS if count <= config.scheduler.max_num_batched_tokens]
    drafters: dict[str, tuple[PassSize, int]] = {}
    proposer = runner.proposer
    if proposer is not None and models.drafter is not None:
        source = str(proposer.drafting.source)
        drafters[source] = _drafter_size(models.drafter), proposer.max_passes
    table = prior_table(machine, _target_size(models.target), drafters, rows)
    if models.drafter is None or models.drafter.max_context is None:
        return table
    most, target = models.drafter.max_context, models.target
    token_bytes = _token_bytes(target.shard, target.dtype) * models.drafter.num_taps
    key_bytes = token_bytes / (2 * target.shard.num_layers)  # of the layers that it looks at
    reading_less = {
        name: replace(cost, max_context=most, look_s=key_bytes / machine.bandwidth)
        for name, cost in table.drafters.items()
    }
    return replace(table, drafters=reading_less)


class _Measuring:
    """Measures what the file of an engine does not know yet."""

    def __init__(
        self,
        config: EngineConfig,
        models: LoadedModels,
        runner: StepRunner,
        prior: CostTable,
        budget_s: float,
    ) -> None:
        self._config, self._models, self._runner = config, models, runner
        self._prior, self._budget_s = prior, budget_s

    def table(self, file: CostFile) -> CostTable:
        """The whole table; what was measured is added to the file."""
        known, started_s = file.read(), time.perf_counter()
        table = known
        if table is None:
            table = replace(self._target(), drafters={})
        drafters: dict[str, DrafterCost] = {}
        for name in self._prior.drafters:  # one at most
            network = self._config.speculation.network
            assert network is not None
            kept_as = f"{name}-{digest(drafter_key(network))}"
            if kept_as not in table.drafters:
                cost = self._drafter(name)
                table = replace(table, drafters=table.drafters | {kept_as: cost})
            drafters[name] = table.drafters[kept_as]
        if table is not known:
            _logger.info("measured in %.2f s what steps cost", time.perf_counter() - started_s)
            file.write(table)
        return replace(table, drafters=drafters)

    def _target(self) -> CostTable:
        share = 1 - DRAFTER_SHARE if self._prior.drafters else 1.0
        steps = self._steps()
        target = TargetSteps(request_counts(steps), steps.num_long)
        measured = take_turns(steps, target.wanted, self._prior.target, share * self._budget_s)
        table = target.fitted(measured, self._prior)
        alone_s, several_s, drafting_s = (
            booking_s(self._config, count, drafts) for count, drafts in ((1, 0), (5, 0), (1, DEPTH))
        )
        return replace(
            table,
            host_s=table.host_s + alone_s,
            host_request_s=table.host_request_s + max(0.0, several_s - alone_s) / 4,
            host_draft_s=table.host_draft_s + max(0.0, drafting_s - alone_s),
        )

    def _drafter(self, name: str) -> DrafterCost:
        proposer, loaded = self._runner.proposer, self._models.drafter
        assert proposer is not None
        assert loaded is not None
        looks = loaded.max_context is not None
        steps = self._steps(LOOKED_AT if looks else LONG)
        drafter = DrafterSteps(
            request_counts(steps),
            steps.num_long,
            depth=min(DEPTH, proposer.max_chain),
            tree=proposer.drafting.levels,
            max_passes=proposer.max_passes,
            reads_texts=loaded.layers is not None,
            lags=not loaded.shares_cache,
            looks=looks,
        )
        budget_s = DRAFTER_SHARE * self._budget_s
        measured = take_turns(steps, drafter.wanted, self._prior.target, budget_s)
        return drafter.fitted(measured, self._prior.drafters[name])

    def _steps(self, most_long: int = LONG) -> ScratchSteps:
        limits = self._config.scheduler
        return ScratchSteps(
            self._runner,
            limits,
            self._runner.state.row_len - 1,
            most_long,
            first_runs_count=self._models.device.type == "cpu",
        )


def read_table(path: Path, name: str) -> CostTable:
    """The table in a file; `name` is what errors call it.

    Raises:
        ConfigError: the file cannot be read, or holds no table.
    """
    try:
        return CostTable.from_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def default_machine(device: torch.device) -> Machine:
    """A machine that nobody has measured."""
    if device.type != "cpu":
        return GPU
    return replace(CPU, peak=CPU.peak * torch.get_num_threads())


def _target_size(model: LanguageModel) -> PassSize:
    """For this rank's part."""
    config = model.shard
    layer = config.hidden_size * 2 * (config.num_heads + config.num_kv_heads) * config.head_size
    layer += 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * layer + model.vocabulary.width * config.hidden_size
    token_bytes = _token_bytes(config, model.dtype)
    routed = model.routed
    always_bytes = model.weight_bytes - (0 if routed is None else routed.nbytes)
    return PassSize(always_bytes, 2 * weights, token_bytes, config.num_layers, routed)


def _drafter_size(drafter: LoadedDrafter) -> PassSize:
    """Its operations follow from its bytes, as if all weights were kept in its own dtype."""
    network, layers = drafter.network, drafter.layers
    num_bytes = network.weight_bytes
    operations = 2 * num_bytes // network.dtype.itemsize
    if layers is None:
        return PassSize(num_bytes, operations, 0, drafter.max_drafts)
    token_bytes = _token_bytes(layers, network.dtype)
    return PassSize(num_bytes, operations, token_bytes, layers.num_layers)


def _token_bytes(config: ModelShape, dtype: torch.dtype) -> int:
    """Keys and values of one token."""
    return KVCache.bytes_per_block(config.cache_shapes, 1, dtype)
