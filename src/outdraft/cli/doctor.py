"""`outdraft doctor`: what this machine has, and what outdraft makes of it.

It measures steps of a model (--cost), and products in fewer bits.

Dimension key: T rows, D inputs, E outputs.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outdraft import assets
from outdraft.cli.command import Model, num_physical_cores, pairs_of, table_of, use_physical_cores
from outdraft.cli.options import EngineOptions, SchedulerOptions, engine_config, takes_options
from outdraft.core.errors import ConfigError
from outdraft.core.weights import QUANTIZATIONS, WeightFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outdraft.config.engine import EngineConfig
    from outdraft.control.costs import CostCurve, CostTable
    from outdraft.kernels.ops import Kernels, Product

Section = dict[str, str]
OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "LD_PRELOAD")
VECTOR_FEATURES = ("avx", "fma", "f16c", "amx", "arm", "sve", "neon")
_GIB = 2**30
MOST_ROWS = 256  # prompts have more; they are not measured
# Hidden size and number of square products: 2 MB and 256 MB in 16 bits.
SMALL, LARGE = (512, 4), (2048, 32)
FORMATS = WeightFormat.INT8, WeightFormat.INT4
_TURNS = 20
_PAYS = 1.1  # speeds up to this one are noise


@takes_options
def doctor(
    model: Model = None,
    *,
    cost: Annotated[bool, typer.Option("--cost")] = False,
    engine: EngineOptions,
    scheduler: SchedulerOptions,
) -> None:
    """Show the hardware, the libraries, and which kernels will be used; of a model also what its
    weights are kept as.

    Args:
        cost: Show what steps of the model take, beside the roofline.
    """
    console = Console(highlight=False)
    if cost:
        config = engine_config(model, engine, scheduler)
        use_physical_cores(os.environ)
        show_costs(console, config)
        return
    sections, missing = examine(os.environ, engine.tensor_parallel_size or 1)
    if model is not None:
        from outdraft.loading.report import report

        config = engine_config(model, engine, scheduler)
        sections = {f"Weights of {model}": report(config)} | sections
    for title, rows in sections.items():
        console.print(pairs_of(rows.items(), title), "")
    if not missing:
        console.print("Nothing is missing.", style="green")
    for line in missing:
        console.print("missing:", style="bold yellow", end=" ")
        console.print(line, markup=False)


def examine(environ: Mapping[str, str], num_ranks: int = 1) -> tuple[dict[str, Section], list[str]]:
    """Facts by section, and what would make outdraft faster or more complete."""
    num_threads = use_physical_cores(environ)

    from outdraft.kernels.choose import has_library
    from outdraft.loading.models import NO_LIBRARY, choose_device

    device = choose_device("auto")
    embedded, missing = _embedded()
    sections = {
        "Machine": _machine(num_threads),
        "GPU": _gpu(),
        **({"Ranks": _ranks(num_ranks, num_threads, device)} if num_ranks > 1 else {}),
        "Libraries": _libraries(),
        "OpenMP": {name: environ.get(name, "not set") for name in OPENMP},
        f"Used on {device}": _used(device),
        "Kernels, by what computes them": _operations(device),
        "Embedded pair": embedded,
    }
    if not has_library():
        missing.append(NO_LIBRARY)
    return sections, missing


def _machine(num_threads: int) -> Section:
    import psutil
    import torch

    from outdraft.loading.machine import processor

    features = sorted(
        name
        for name, has in torch.cpu.get_capabilities().items()
        if has is True and name.startswith(VECTOR_FEATURES)
    )
    memory = psutil.virtual_memory()
    return {
        "processor": processor() or "unknown",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "cores": f"{num_physical_cores()} physical for this process, {os.cpu_count()} logical",
        "threads": str(num_threads),
        "vector features": ", ".join(features) or torch.backends.cpu.get_cpu_capability(),
        "memory": f"{memory.available / _GIB:.1f} GiB free of {memory.total / _GIB:.1f} GiB",
    }


def _gpu() -> Section:
    import torch

    if not torch.cuda.is_available():
        build = torch.version.cuda
        return {"none": f"torch is built for CUDA {build}" if build else "torch is built for CPUs"}
    cards = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
    return {
        f"cuda:{at}": f"{card.name}, {card.total_memory / _GIB:.0f} GiB"
        for at, card in enumerate(cards)
    }


def _ranks(size: int, num_threads: int, device: "torch.device") -> Section:
    """List the processors or the card of each of `size` ranks."""
    from outdraft.loading.machine import cores_of_ranks, topology

    found: Section = {}
    for rank, cores in enumerate(cores_of_ranks(size, num_threads, topology())):
        threads = f"{cores.num_threads} thread{'s' if cores.num_threads > 1 else ''}"
        if device.type == "cuda":
            found[f"rank {rank}"] = f"cuda:{rank}, {threads}"
        elif cores.cpus:
            cpus = ", ".join(map(str, cores.cpus))
            found[f"rank {rank}"] = f"{threads} on the logical processors {cpus}"
        else:
            found[f"rank {rank}"] = f"{threads} on any processor: there are fewer cores than ranks"
    return found


def _libraries() -> Section:
    import torch

    from outdraft.loading.machine import installed_version

    backends = {
        "MKL": torch.backends.mkl.is_available(),
        "oneDNN": torch.backends.mkldnn.is_available(),
        "OpenMP": torch.backends.openmp.is_available(),
    }
    names = ("outdraft", "torch", "numpy", "tokenizers")
    rows = {name: installed_version(name) or "not installed" for name in names}
    rows["torch has"] = ", ".join(name for name, has in backends.items() if has) or "none of them"
    return rows


def _used(device: "torch.device") -> Section:
    import torch

    from outdraft.kernels.choose import choose_kernels, kernels_options
    from outdraft.loading.models import choose_dtype
    from outdraft.models.modules import dtype_name

    automatic = choose_dtype("auto", "bfloat16", device)
    kernels = choose_kernels("auto", device, automatic)
    kept = kernels.pack_linear(torch.zeros(1, 1, dtype=automatic), None, None).format
    rows = {
        "dtype auto": f"{dtype_name(automatic)} for a bfloat16 checkpoint, "
        f"whose weights are kept {kept}"
    }
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        rows[f"kernels for {dtype_name(dtype)}"] = choose_kernels("auto", device, dtype).name
    rows["--kernels may be"] = ", ".join(kernels_options())
    rows["--quantization may be"] = ", ".join(QUANTIZATIONS)
    if device.type == "cpu" and kept is not WeightFormat.PLAIN:  # other kernels read rounded copies
        for name, size in (("small drafter", SMALL), ("large model", LARGE)):
            speeds = quantized_speeds(kernels, automatic, *size)
            rows[f"quantization of a {name}"] = advice(speeds)
    return rows


def _operations(device: "torch.device") -> Section:
    """Name the module of each operation for the usual dtypes, and for another one if it differs."""
    import torch

    from outdraft.kernels.choose import choose_kernels, computed_by
    from outdraft.models.modules import dtype_name

    rows = computed_by(choose_kernels("auto", device, torch.bfloat16))
    usual = dict(rows)
    for dtype in (torch.float32, torch.float64):
        for operation, module in computed_by(choose_kernels("auto", device, dtype)).items():
            if module != usual[operation]:
                rows[operation] += f", {module} for {dtype_name(dtype)}"
    return rows


def _embedded() -> tuple[Section, list[str]]:
    """Find the embedded models; also a message for each that is missing."""
    finders: dict[str, Callable[[], object]] = {
        "target": assets.target_path,
        "drafter": assets.drafter_path,
        "prompts": lambda: f"{len(assets.prompts())} held out",
    }
    found, missing = dict.fromkeys(finders, "missing"), list[str]()
    for name, find in finders.items():
        try:
            found[name] = str(find())
        except ConfigError as error:
            missing.append(str(error))
    return found, missing


def show_costs(console: Console, config: "EngineConfig") -> None:
    """Measure costs that no earlier start measured, and print all of them."""
    from outdraft.costs.table import cost_file, cost_table, default_machine, roofline
    from outdraft.engine.build import build_engine
    from outdraft.kernels.choose import machine_limits
    from outdraft.ranks.launch import load_on_ranks

    if not config.speculation.sources:
        raise ConfigError("--cost is about speculation: name a method in --speculative-config")
    models = load_on_ranks(config)
    runner = build_engine(replace(config, cost_table="roofline"), models)[0].runner
    table = cost_table(config, models, runner)
    machine, measured = default_machine(models.device), None
    if models.device.type == "cpu":
        measured = machine_limits(models.target.dtype)
    if measured is not None:  # rooflines leave out what the host does around a pass
        machine = replace(machine, bandwidth=measured[0], peak=measured[1], call_s=0.0)
    limits = roofline(config, models, runner, machine)
    console.print(
        f"{'not measured: ' if measured is None else ''}{machine.bandwidth / 1e9:.0f} GB/s, "
        f"{machine.peak / 1e9:.0f} billion operations/s; target: {models.target.numbers}",
        style="bold",
    )
    _show_curve(console, "Target, by rows", table.target, limits.target)
    console.print(pairs_of(_beside_rows(table, limits).items()), "")
    for name, cost in table.drafters.items():
        _show_curve(console, f"{name}, a pass by rows", cost.passes, limits.drafters[name].passes)
        pairs = zip(cost.catch_up.rows, cost.catch_up.seconds, strict=True)
        lags = [f"{rows} {_ms(seconds)}" for rows, seconds in pairs if rows <= MOST_ROWS]
        numbers = {
            "in each step in which it drafts": f"{_ms(cost.start_s)} ms",
            "to catch up, by tokens": f"{', '.join(lags)} ms",
            "each token of a context": f"{cost.context_s * 1e6:.2f} us a pass",
            "passes of a draft": f"at most {cost.max_passes}",
        }
        if cost.max_context is not None:
            looking = f"{cost.look_s * 1e6:.2f} us a step"
            numbers[f"each token of a text of more than {cost.max_context}"] = looking
        console.print(pairs_of(numbers.items()), "")
    kept = cost_file(config, models, runner).path if config.cost_table == "auto" else None
    console.print(f"kept in {kept}" if kept else f"read from {config.cost_table}", markup=False)


def _show_curve(console: Console, title: str, measured: "CostCurve", limit: "CostCurve") -> None:
    import numpy as np

    counts = [count for count in measured.rows if count <= MOST_ROWS]
    curves = (curve.at(np.array(counts)).tolist() for curve in (measured, limit))
    rows = [
        (str(count), _ms(seconds), _ms(least_s), f"{least_s / seconds:.0%}" if seconds > 0 else "")
        for count, seconds, least_s in zip(counts, *curves, strict=True)
    ]
    headings = ("rows", "ms", "roofline ms", "share")
    console.print(table_of(headings, rows, title, title_style="bold"))


def _beside_rows(table: "CostTable", limits: "CostTable") -> dict[str, str]:
    context, least = table.context_s * 1e6, limits.context_s * 1e6
    rows = {
        "each token of a context": f"{context:.2f} us (roofline {least:.2f})",
        "each further request": f"{table.request_s * 1e6:.0f} us",
    }
    names = {
        "the host, a step": "host_s",
        "each further request of it": "host_request_s",
        "a step with drafts, more": "host_draft_s",
    }
    for title, name in names.items():
        own_us, prior_us = (getattr(one, name) * 1e6 for one in (table, limits))
        rows[title] = f"{own_us:.0f} us (prior {prior_us:.0f})"
    return rows


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def quantized_speeds(
    kernels: "Kernels", dtype: "torch.dtype", hidden: int, num_products: int
) -> dict[WeightFormat, float]:
    """Measure how many times as fast one row passes through int8 and int4 as through `dtype`.

    The answer depends on where the weights lie. Those of a small drafter stay in the processor's
    cache, where taking codes apart costs time; those of a large model come from memory, where fewer
    bytes win. The formats take turns; the medians are compared.
    """
    import torch

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


def _seconds(products: "Sequence[Product]", x_TD: "Tensor") -> float:
    start_s = time.perf_counter()
    for product in products:
        product(x_TD)
    return time.perf_counter() - start_s
