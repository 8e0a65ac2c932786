"""`outdraft doctor --cost`: what steps of a model cost here, beside the least that they could."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from outdraft.cli.command import pairs_of, table_of
from outdraft.core.errors import ConfigError

if TYPE_CHECKING:
    from outdraft.config.engine import EngineConfig
    from outdraft.control.costs import CostCurve, CostTable
    from outdraft.control.roofline import MachineLimits
    from outdraft.loading.models import LoadedModels

MOST_ROWS = 256  # prompts have more; they are not measured


def show_costs(console: Console, config: "EngineConfig") -> None:
    """Measure what is not known yet, and print all of it."""
    from outdraft.costs.prior import roofline
    from outdraft.costs.table import cost_file, cost_table
    from outdraft.engine.build import build_engine
    from outdraft.loading.models import load_models

    if not config.speculation.sources:
        raise ConfigError("--cost is about speculation: name a method in --speculative-config")
    models = load_models(config)
    runner = build_engine(replace(config, cost_table="roofline"), models)[0].runner
    table = cost_table(config, models, runner)
    machine, is_measured = _machine(models)
    limits = roofline(config, models, runner, machine)
    console.print(
        f"{'' if is_measured else 'not measured: '}{machine.bandwidth / 1e9:.0f} GB/s, "
        f"{machine.peak / 1e9:.0f} billion operations/s; target: {models.target.numbers}",
        style="bold",
    )
    _show_curve(console, "Target, by rows", table.target, limits.target)
    console.print(pairs_of(_beside_rows(table, limits).items()), "")
    for name, cost in table.drafters.items():
        limit = limits.drafters[name]
        _show_curve(console, f"{name}, a pass by rows", cost.passes, limit.passes)
        lags = ", ".join(
            f"{rows} {_ms(seconds)}"
            for rows, seconds in zip(cost.catch_up.rows, cost.catch_up.seconds, strict=True)
            if rows <= MOST_ROWS
        )
        numbers = {
            "in each step in which it drafts": f"{_ms(cost.start_s)} ms",
            "to catch up with so many tokens": f"{lags} ms",
            "each token of a context": f"{cost.context_s * 1e6:.2f} us a pass",
            "passes of a draft": f"at most {cost.max_passes}",
        }
        if cost.max_context is not None:
            looking = f"{cost.look_s * 1e6:.2f} us a step"
            numbers[f"each token of a text of more than {cost.max_context}"] = looking
        console.print(pairs_of(numbers.items()), "")
    kept = cost_file(config, models, runner).path if config.cost_table == "auto" else None
    console.print(f"kept in {kept}" if kept else f"read from {config.cost_table}", markup=False)


def _machine(models: "LoadedModels") -> "tuple[MachineLimits, bool]":
    """What this machine does at most, and whether that was measured."""
    from outdraft.costs.prior import default_machine
    from outdraft.kernels.choose import machine_limits

    limits = machine_limits(models.target.dtype) if models.device.type == "cpu" else None
    machine = default_machine(models.device)
    if limits is None:
        return machine, False
    # Rooflines leave out what the host does around a pass.
    return replace(machine, bandwidth=limits[0], peak=limits[1], call_s=0.0), True


def _show_curve(console: Console, title: str, measured: "CostCurve", limit: "CostCurve") -> None:
    table = table_of((), ("rows", "ms", "roofline ms", "share"), title, title_style="bold")
    rows = [count for count in measured.rows if count <= MOST_ROWS]
    limits = limit.at(np.array(rows)).tolist()
    for count, seconds, limit_s in zip(
        rows, measured.at(np.array(rows)).tolist(), limits, strict=True
    ):
        share = f"{limit_s / seconds:.0%}" if seconds > 0 else ""
        table.add_row(str(count), _ms(seconds), _ms(limit_s), share)
    console.print(table)


def _beside_rows(table: "CostTable", limits: "CostTable") -> dict[str, str]:
    context, least = table.context_s * 1e6, limits.context_s * 1e6
    return {
        "each token of a context": f"{context:.2f} us (roofline {least:.2f})",
        "each further request": f"{table.request_s * 1e6:.0f} us",
        "the host, a step": f"{table.host_s * 1e6:.0f} us (prior {limits.host_s * 1e6:.0f})",
        "each further request of it": f"{table.host_request_s * 1e6:.0f} us "
        f"(prior {limits.host_request_s * 1e6:.0f})",
        "a step with drafts, more": f"{table.host_draft_s * 1e6:.0f} us "
        f"(prior {limits.host_draft_s * 1e6:.0f})",
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"
