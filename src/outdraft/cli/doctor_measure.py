"""Times that `outdraft doctor` measures: steps of a model (--cost), and products in fewer bits.

Dimension key: T rows, D inputs, E outputs.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from outdraft.cli.command import pairs_of, table_of
from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.kernels.ops import Kernels, Product

if TYPE_CHECKING:
    from outdraft.config.engine import EngineConfig
    from outdraft.control.costs import CostCurve, CostTable
    from outdraft.control.roofline import MachineLimits
    from outdraft.loading.models import LoadedModels

MOST_ROWS = 256  # prompts have more; they are not measured
# Hidden size and number of square products: 2 MB and 256 MB in 16 bits.
SMALL, LARGE = (512, 4), (2048, 32)
FORMATS = WeightFormat.INT8, WeightFormat.INT4
_TURNS = 20
_PAYS = 1.1  # speeds up to this one are noise


def show_costs(console: Console, config: "EngineConfig") -> None:
    """Measure costs that no earlier start measured, and print all of them."""
    from outdraft.costs.prior import roofline
    from outdraft.costs.table import cost_file, cost_table
    from outdraft.engine.build import build_engine
    from outdraft.ranks.launch import load_on_ranks

    if not config.speculation.sources:
        raise ConfigError("--cost is about speculation: name a method in --speculative-config")
    models = load_on_ranks(config)
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
            "to catch up, by tokens": f"{lags} ms",
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
    """Limits of this machine, and True if they were measured."""
    from outdraft.costs.prior import default_machine
    from outdraft.kernels.choose import machine_limits

    limits = machine_limits(models.target.dtype) if models.device.type == "cpu" else None
    machine = default_machine(models.device)
    if limits is None:
        return machine, False
    # Rooflines leave out what the host does around a pass.
    return replace(machine, bandwidth=limits[0], peak=limits[1], call_s=0.0), True


def _show_curve(console: Console, title: str, measured: "CostCurve", limit: "CostCurve") -> None:
    counts = [count for count in measured.rows if count <= MOST_ROWS]
    curves = (curve.at(np.array(counts)).tolist() for curve in (measured, limit))
    rows = [
        (str(count), _ms(seconds), _ms(least_s), f"{least_s / seconds:.0%}" if seconds > 0 else "")
        for count, seconds, least_s in zip(counts, *curves, strict=True)
    ]
    headings = ("rows", "ms", "roofline ms", "share")
    console.print(table_of((), headings, rows, title, title_style="bold"))


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


def quantized_speeds(
    kernels: Kernels, dtype: torch.dtype, hidden: int, num_products: int
) -> dict[WeightFormat, float]:
    """Measure how many times as fast one row passes through int8 and int4 as through `dtype`.

    The answer depends on where the weights lie. Those of a small drafter stay in the processor's
    cache, where taking codes apart costs time; those of a large model come from memory, where fewer
    bytes win. The formats take turns; the medians are compared.
    """
    weight_ED = torch.randn(hidden, hidden).bfloat16().to(dtype)
    x_TD = torch.randn(1, hidden).to(dtype)
    products = [
        [kernels.pack_linear(weight_ED, None, kept) for _ in range(num_products)]
        for kept in (None, *FORMATS)
    ]
    times_s = [[_seconds(of_one, x_TD) for of_one in products] for _ in range(_TURNS)]
    plain_s, *coded_s = (statistics.median(of_one) for of_one in zip(*times_s, strict=True))
    return {kept: plain_s / one_s for kept, one_s in zip(FORMATS, coded_s, strict=True)}


def advice(speeds: Mapping[WeightFormat, float]) -> str:
    """Say which format is the fastest, and whether it pays."""
    shown = ", ".join(f"{kept} {speed:.2f}" for kept, speed in speeds.items())
    best = max(speeds, key=lambda kept: speeds[kept])
    verdict = f"{best} is recommended" if speeds[best] > _PAYS else "none is recommended"
    return f"{shown} times as fast as weights as they are: {verdict}"


def _seconds(products: Sequence[Product], x_TD: Tensor) -> float:
    start_s = time.perf_counter()
    for product in products:
        product(x_TD)
    return time.perf_counter() - start_s
