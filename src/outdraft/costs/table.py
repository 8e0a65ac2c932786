"""Makes the table of what an engine's steps cost, for the controller, before the first request.

It is measured once for each model, machine and network that drafts, in the time that a budget
allows, and kept on disk. Small models take less than 1 s; others at most the budget. What was not
measured is estimated by rooflines of the networks.
"""

import logging
import time
from dataclasses import replace
from pathlib import Path

import torch

from outdraft.config.engine import EngineConfig
from outdraft.config.fields import read_text
from outdraft.control.costs import CostTable, DrafterCost
from outdraft.control.roofline import ROWS, MachineLimits, PassSize, prior_table
from outdraft.core.errors import ConfigError
from outdraft.costs.file import CostFile, default_folder, digest, drafter_key, target_key
from outdraft.costs.measurement import (
    DEPTH,
    drafter_steps,
    fitted_drafter,
    fitted_target,
    measure,
    request_counts,
    target_steps,
)
from outdraft.kv.cache import KVCache
from outdraft.loading.methods import LoadedDrafter
from outdraft.loading.models import LoadedModels
from outdraft.models.base import LanguageModel
from outdraft.models.shape import ModelShape
from outdraft.runner.dummy_steps import DummySteps
from outdraft.runner.parallel_runner import StepRunner

AUTO, ROOFLINE = "auto", "roofline"
BUDGET_S, DRAFTER_SHARE = 3.0, 1 / 2
_logger = logging.getLogger(__name__)
# Moderate machines, for where none was measured.
CPU = MachineLimits(
    bandwidth=20e9,
    peak=100e9,  # of one thread
    call_s=60e-6,
    host_s=120e-6,
    host_request_s=20e-6,
    host_draft_s=80e-6,
)
GPU = MachineLimits(
    bandwidth=1.5e12,
    peak=2e14,
    launch_s=60e-6,
    call_s=500e-6,
    host_s=500e-6,
    host_request_s=20e-6,
    host_draft_s=100e-6,
)


def cost_table(
    config: EngineConfig,
    models: LoadedModels,
    runner: StepRunner,
    *,
    budget_s: float = BUDGET_S,
    folder: Path | None = None,
) -> CostTable:
    """Make the costs of an engine whose runner is idle and serves no request yet.

    `config.cost_table` chooses: measured (or measured before), from a roofline, or from a file. An
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
        found = read_table(Path(config.cost_table), f"cost_table {config.cost_table!r}")
        return replace(found, drafters=prior.drafters | found.drafters)
    return _measured(config, models, runner, prior, budget_s, folder)


def _measured(
    config: EngineConfig,
    models: LoadedModels,
    runner: StepRunner,
    prior: CostTable,
    budget_s: float,
    folder: Path | None,
) -> CostTable:
    """Measure what the file of the engine does not have yet, and add it to the file."""
    file = cost_file(config, models, runner, folder)
    stored, started_s = file.read(), time.perf_counter()
    table, drafters = stored, dict[str, DrafterCost]()
    if table is None:
        steps = _dummy_steps(config, models, runner)
        counts, share = request_counts(steps), 1 - DRAFTER_SHARE if prior.drafters else 1.0
        found = measure(steps, target_steps(counts), prior.target, share * budget_s)
        table = replace(fitted_target(found, counts, steps.num_long, prior), drafters={})
    proposer, loaded, network = runner.proposer, models.drafter, config.speculation.network
    if proposer is not None and loaded is not None and network is not None:
        name = str(proposer.drafter.source)
        kept_as = f"{name}-{digest(drafter_key(network))}"
        if kept_as not in table.drafters:
            steps, depth = _dummy_steps(config, models, runner), min(DEPTH, proposer.max_chain)
            counts, reads_texts = request_counts(steps), loaded.layers is not None
            wanted = drafter_steps(
                counts, depth, reads_texts=reads_texts, shares_cache=loaded.shares_cache
            )
            found = measure(steps, wanted, prior.target, DRAFTER_SHARE * budget_s)
            cost = fitted_drafter(found, counts, steps.num_long, depth, prior.drafters[name])
            table = replace(table, drafters=table.drafters | {kept_as: cost})
        drafters[name] = table.drafters[kept_as]
    if table is not stored:
        _logger.info("measured in %.2f s what steps cost", time.perf_counter() - started_s)
        file.write(table)
    return replace(table, drafters=drafters)


def cost_file(
    config: EngineConfig, models: LoadedModels, runner: StepRunner, folder: Path | None = None
) -> CostFile:
    """The file of an engine's measured table."""
    key = target_key(config, models, runner.state.row_len - 1)
    return CostFile(folder or default_folder(), key)


def _dummy_steps(config: EngineConfig, models: LoadedModels, runner: StepRunner) -> DummySteps:
    return DummySteps(
        runner,
        config.scheduler,
        runner.state.row_len - 1,
        first_runs_count=models.device.type == "cpu",
    )


def read_table(path: Path, name: str) -> CostTable:
    """Read the table in a file; `name` is its name in errors.

    Raises:
        ConfigError: the file cannot be read, or holds no table.
    """
    text = read_text(path, name)
    try:
        return CostTable.from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def roofline(
    config: EngineConfig, models: LoadedModels, runner: StepRunner, machine: MachineLimits
) -> CostTable:
    """Make the prior of an engine from control/roofline.py."""
    rows = [count for count in ROWS if count <= config.scheduler.max_num_batched_tokens]
    drafters: dict[str, tuple[PassSize, int]] = {}
    proposer = runner.proposer
    if proposer is not None and models.drafter is not None:
        source = str(proposer.drafter.source)
        drafters[source] = _drafter_size(models.drafter), proposer.max_passes
    table = prior_table(machine, _target_size(models.target), drafters, rows)
    if models.drafter is None or models.drafter.max_context is None:
        return table
    most, target = models.drafter.max_context, models.target
    token_bytes = _token_bytes(target.shard, target.dtype) * models.drafter.num_taps
    key_bytes = token_bytes / (2 * target.shard.num_layers)  # of the layers that it attends to
    reading_less = {
        name: replace(cost, max_context=most, look_s=key_bytes / machine.bandwidth)
        for name, cost in table.drafters.items()
    }
    return replace(table, drafters=reading_less)


def default_machine(device: torch.device) -> MachineLimits:
    """Assume a moderate machine."""
    if device.type != "cpu":
        return GPU
    return replace(CPU, peak=CPU.peak * torch.get_num_threads())


def _target_size(model: LanguageModel) -> PassSize:
    """The size of a pass of this rank's part."""
    config = model.shard
    layer = config.hidden_size * 2 * (config.num_heads + config.num_kv_heads) * config.head_size
    layer += 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * layer + model.vocabulary.width * config.hidden_size
    token_bytes = _token_bytes(config, model.dtype)
    routed = model.routed
    always_bytes = model.weight_bytes - (0 if routed is None else routed.nbytes)
    return PassSize(always_bytes, 2 * weights, token_bytes, config.num_layers, routed)


def _drafter_size(drafter: LoadedDrafter) -> PassSize:
    """Operations follow from bytes, as if all weights were kept in the network's dtype."""
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
