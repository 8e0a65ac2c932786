"""`outdraft doctor`: what this machine has, and what outdraft makes of it."""

import os
import platform
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outdraft import assets
from outdraft.cli.command import Model, num_physical_cores, pairs_of, use_physical_cores
from outdraft.cli.options import EngineOptions, SchedulerOptions, serving_config, takes_options
from outdraft.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

Section = dict[str, str]
OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "LD_PRELOAD")
VECTOR_FEATURES = ("avx", "fma", "f16c", "amx", "arm", "sve", "neon")
_GIB = 2**30


@takes_options
def doctor(
    model: Model = None,
    *,
    cost: Annotated[
        bool,
        typer.Option("--cost", help="Show what steps of the model take, beside the roofline."),
    ] = False,
    engine: EngineOptions,
    scheduler: SchedulerOptions,
) -> None:
    """Show the hardware, the libraries, and which kernels will be used; of a model also what its
    weights are kept as."""
    console = Console(highlight=False)
    if cost:
        config = serving_config(model, engine, scheduler)
        use_physical_cores(os.environ)
        from outdraft.cli.doctor_measure import show_costs

        show_costs(console, config)
        return
    sections, missing = examine(os.environ, engine.tensor_parallel_size or 1)
    if model is not None:
        from outdraft.loading.report import report

        config = serving_config(model, engine, scheduler)
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
    found: Section = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB"
    return found


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

    from outdraft.cli.doctor_measure import LARGE, SMALL, advice, quantized_speeds
    from outdraft.core.weights import QUANTIZATIONS, WeightFormat
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

    tables = {
        dtype: computed_by(choose_kernels("auto", device, dtype))
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }
    usual = tables[torch.bfloat16]
    return {
        operation: ", ".join(
            [
                module,
                *(
                    f"{table[operation]} for {dtype_name(dtype)}"
                    for dtype, table in tables.items()
                    if table[operation] != module
                ),
            ]
        )
        for operation, module in usual.items()
    }


def _embedded() -> tuple[Section, list[str]]:
    """Find the embedded models; also a message for each that is missing."""
    finders: dict[str, Callable[[], object]] = {
        "target": assets.target_path,
        "drafter": assets.drafter_path,
        "prompts": lambda: f"{len(assets.prompts())} held out",
    }
    found: Section = {}
    missing: list[str] = []
    for name, find in finders.items():
        try:
            found[name] = str(find())
        except ConfigError as error:
            found[name] = "missing"
            missing.append(str(error))
    return found, missing
