"""Makes the table of what an engine's steps cost, for the controller, before the first request.

It is measured once for each model, machine and network that drafts, in the time that a budget
allows, and kept on disk. Small models take less than 1 s; others at most the budget.
"""

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from outdraft.config.engine import EngineConfig
from outdraft.control.costs import CostTable, DrafterCost
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
from outdraft.costs.prior import default_machine, roofline
from outdraft.loading.models import LoadedModels
from outdraft.runner.dummy_steps import DummySteps
from outdraft.runner.parallel_runner import StepRunner

AUTO, ROOFLINE = "auto", "roofline"
BUDGET_S, DRAFTER_SHARE = 3.0, 1 / 2
_logger = logging.getLogger(__name__)


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
    measuring = _Measuring(config, models, runner, prior, budget_s)
    return measuring.table(cost_file(config, models, runner, folder))


def cost_file(
    config: EngineConfig, models: LoadedModels, runner: StepRunner, folder: Path | None = None
) -> CostFile:
    """The file of an engine's measured table."""
    key = target_key(config, models, runner.state.row_len - 1)
    return CostFile(folder or default_folder(), key)


@dataclass(frozen=True, slots=True)
class _Measuring:
    """Measures the costs that the file of an engine does not have yet."""

    config: EngineConfig
    models: LoadedModels
    runner: StepRunner
    prior: CostTable
    budget_s: float

    def table(self, file: CostFile) -> CostTable:
        """The whole table; what was measured is added to the file."""
        stored, started_s = file.read(), time.perf_counter()
        table = stored or self._target()
        drafters: dict[str, DrafterCost] = {}
        for name in self.prior.drafters:  # one at most
            network = self.config.speculation.network
            assert network is not None
            kept_as = f"{name}-{digest(drafter_key(network))}"
            if kept_as not in table.drafters:
                cost = self._drafter(name)
                table = replace(table, drafters=table.drafters | {kept_as: cost})
            drafters[name] = table.drafters[kept_as]
        if table is not stored:
            _logger.info("measured in %.2f s what steps cost", time.perf_counter() - started_s)
            file.write(table)
        return replace(table, drafters=drafters)

    def _target(self) -> CostTable:
        steps = self._steps()
        counts, share = request_counts(steps), 1 - DRAFTER_SHARE if self.prior.drafters else 1.0
        found = measure(steps, target_steps(counts), self.prior.target, share * self.budget_s)
        return replace(fitted_target(found, counts, steps.num_long, self.prior), drafters={})

    def _drafter(self, name: str) -> DrafterCost:
        proposer, loaded, steps = self.runner.proposer, self.models.drafter, self._steps()
        assert proposer is not None
        assert loaded is not None
        counts, depth = request_counts(steps), min(DEPTH, proposer.max_chain)
        reads_texts = loaded.layers is not None
        wanted = drafter_steps(
            counts, depth, reads_texts=reads_texts, shares_cache=loaded.shares_cache
        )
        budget_s = DRAFTER_SHARE * self.budget_s
        found = measure(steps, wanted, self.prior.target, budget_s)
        return fitted_drafter(found, counts, steps.num_long, depth, self.prior.drafters[name])

    def _steps(self) -> DummySteps:
        return DummySteps(
            self.runner,
            self.config.scheduler,
            self.runner.state.row_len - 1,
            first_runs_count=self.models.device.type == "cpu",
        )


def read_table(path: Path, name: str) -> CostTable:
    """Read the table in a file; `name` is its name in errors.

    Raises:
        ConfigError: the file cannot be read, or holds no table.
    """
    try:
        return CostTable.from_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
