"""The one place that chooses how operations are computed."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch

from outdraft.core.errors import ConfigError, did_you_mean
from outdraft.distributed.shared_memory import MemoryTransports
from outdraft.kernels.data.graph_sizes import rounded_rows
from outdraft.kernels.native.library import (
    Limits,
    open_library,
    shared_team,
    usable_instruction_sets,
)
from outdraft.kernels.native.linear import DTYPES
from outdraft.kernels.native.ranks import NativeMemoryTransports
from outdraft.kernels.native.table import native_host_kernels, native_kernels
from outdraft.kernels.ops import Kernels, operation_names
from outdraft.kernels.torch.experts import GroupedExperts
from outdraft.kernels.torch.table import reference_kernels

AUTO, REFERENCE = "auto", "reference"
LIMIT_BYTES, LIMIT_TURNS = 1 << 28, 5


def kernels_options() -> tuple[str, ...]:
    """The options of `choose_kernels` on this machine."""
    return (AUTO, REFERENCE, *usable_instruction_sets())


def check_option(option: str) -> None:
    """Raise ConfigError if this machine has no kernels of that name."""
    if option not in kernels_options():
        raise ConfigError(f"unknown kernels {option!r}: {did_you_mean(option, kernels_options())}")


def has_library() -> bool:
    """True if any instruction set of this machine has a compiled library."""
    return bool(usable_instruction_sets())


def computed_by(kernels: Kernels) -> dict[str, str]:
    """For each operation the module that computes it, as its name below `outdraft.kernels`."""
    found: dict[str, str] = {}
    for operation in operation_names():
        computing = getattr(kernels, operation)
        computing = getattr(computing, "func", computing)  # what a functools.partial calls
        named = computing if hasattr(computing, "__qualname__") else type(computing)
        found[operation] = named.__module__.removeprefix("outdraft.kernels.")
    return found


def has_graphs(kernels: Kernels) -> bool:
    """True if passes, drafts that grow and their verification become CUDA graphs."""
    return computed_by(kernels)["verify"] == "triton.graphed"


def automatic_dtype(option: str, device: torch.device, own: torch.dtype) -> torch.dtype:
    """The fastest dtype that keeps what a checkpoint of dtype `own` holds.

    On a GPU its own. On a CPU float32, but bfloat16 for bfloat16 weights where the library has
    instructions that multiply bfloat16.

    Raises:
        ConfigError: an unknown option of the kernels.
    """
    check_option(option)
    if device.type != "cpu":
        return own
    library = None if option == REFERENCE else open_library(None if option == AUTO else option)
    if own is torch.bfloat16 and library is not None and library.keeps_bf16:
        return torch.bfloat16
    return torch.float32


def machine_limits(dtype: torch.dtype) -> tuple[float, float] | None:
    """Bytes a second and operations a second that this machine's processor reaches at most.

    The best of a few readings with all threads, in about 0.1 s; None: there is no library.
    """
    library = open_library()
    if library is None:
        return None
    team = shared_team(library, torch.get_num_threads())
    limits = Limits(team, is_bf16=dtype is torch.bfloat16, read_bytes=LIMIT_BYTES)
    readings = [(limits.bandwidth(), limits.peak()) for _ in range(LIMIT_TURNS)]
    bandwidths, peaks = zip(*readings, strict=True)
    return max(bandwidths), max(peaks)


def memory_transports() -> MemoryTransports | None:
    """Connect the ranks of this machine over memory; None: there is no library."""
    library = open_library()
    return None if library is None else NativeMemoryTransports(library)


def choose_kernels(
    option: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    has_graphs: bool = True,
    activation_dtype: str = AUTO,
) -> Kernels:
    """The table for models of a dtype on a device.

    Args:
        option: "auto": the fastest for the machine; "reference": the readable operations only; or
            an instruction set that the machine has, for its library.
        has_graphs: on a GPU, passes of few rows, drafts that grow and their verification become
            graphs.
        activation_dtype: as EngineConfig's.

    Raises:
        ConfigError: an unknown option, or activation_dtype is int8 and there are no products of
            8-bit integers.
    """
    check_option(option)
    is_cpu = device.type == "cpu"
    library = None if option == REFERENCE else open_library(None if option == AUTO else option)
    if activation_dtype == "int8" and (library is None or not is_cpu or dtype not in DTYPES):
        raise ConfigError(
            "activation_dtype int8 needs a model of float32 or bfloat16 on a CPU, and its compiled "
            "kernels; allowed here: auto, float"
        )
    reference = reference_kernels(in_order=is_cpu)
    if option == REFERENCE:
        return reference
    if library is not None and is_cpu and dtype in DTYPES:
        meets_bytes = activation_dtype != "float"
        return native_kernels(library, torch.get_num_threads(), meets_bytes=meets_bytes)
    chosen = reference
    if dtype is torch.bfloat16 and not is_cpu:  # torch has no group of others without a wait
        chosen = replace(reference, pack_experts=GroupedExperts)
    if library is not None:
        chosen = native_host_kernels(library, chosen, is_cpu=is_cpu)
    return with_triton(chosen, has_graphs=has_graphs) if device.type == "cuda" else chosen


def with_triton(others: Kernels, *, has_graphs: bool) -> Kernels:
    """The table of a GPU; as it is without triton, an extra.

    Args:
        has_graphs: passes of few rows, drafts that grow and their verification become CUDA graphs.
    """
    if find_spec("triton") is None:
        return others
    from outdraft.kernels.triton import drafting, noise, traversal
    from outdraft.kernels.triton.attention import TritonAttention
    from outdraft.kernels.triton.decoder import TritonDecoder
    from outdraft.kernels.triton.graphed import GraphedGrowth, GraphedVerification

    kernels = replace(
        others,
        name=f"triton, {others.name}",
        attention=TritonAttention(),
        gumbel=noise.gumbel,
        place_level=drafting.place_level,
        draw_level=drafting.draw_level,
        verify=traversal.verify,
        compile_decoder=partial(TritonDecoder, has_graphs=has_graphs, warm_ups=others.warm_ups),
    )
    if not has_graphs:
        return kernels
    verification = GraphedVerification(kernels)
    return replace(
        kernels,
        grow=GraphedGrowth(kernels.warm_ups),
        verify=verification.verify,
        padded_draft_batch=rounded_rows,
        choose=verification.choose,
    )
