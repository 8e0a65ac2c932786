"""Through the whole table: each implementation of each operation against the reference.

comparisons.py says how an operation gets its comparison.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.kernels.choose import (
    REFERENCE,
    choose_kernels,
    computed_by,
    kernels_options,
    with_triton,
)
from outdraft.kernels.native.library import usable_instruction_sets
from outdraft.kernels.ops import Kernels, operation_names
from tests.kernels.comparisons import Case, Comparison

CPU = torch.device("cpu")
OPERATIONS = operation_names()
# Interpreted they take seconds; a model's dtype changes nothing for them.
QUICK_IN_TRITON = ("gumbel", "place_level")
TABLES = [*kernels_options(), *(["triton"] if find_spec("triton") else [])]


def comparisons() -> dict[str, Comparison]:
    """What all test modules of this folder name."""
    found: dict[str, Comparison] = {}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path.name == Path(__file__).name:
            continue
        of_module = getattr(import_module(f"tests.kernels.{path.stem}"), "COMPARISONS", {})
        assert not found.keys() & of_module.keys(), f"{path.name} compares what another one does"
        found |= of_module
    return found


COMPARISONS = comparisons()


def table(option: str, dtype: torch.dtype) -> Kernels:
    """That of an option; "triton": what runs on a GPU, in Triton's interpreter where none is."""
    if option != "triton":
        return choose_kernels(option, CPU, dtype, activation_dtype="float")
    others = choose_kernels(REFERENCE, CPU, dtype)
    return replace(with_triton(others, has_graphs=False), name="triton")


def implementations() -> Iterator[object]:
    """Operation, option, dtype: each implementation once, and the readable one too."""
    seen: set[tuple[str, torch.dtype, str, str]] = set()
    for operation in OPERATIONS:
        for dtype in (torch.float32, torch.bfloat16):
            for option in TABLES:
                kernels = table(option, dtype)
                implementation = getattr(kernels, operation)
                instruction_set = "" if is_readable(implementation) else kernels.name
                key = (operation, dtype, identity(implementation), instruction_set)
                if key not in seen:
                    seen.add(key)
                    name = str(dtype).removeprefix("torch.")
                    is_quick = operation in QUICK_IN_TRITON and dtype is torch.float32
                    yield pytest.param(
                        operation,
                        option,
                        dtype,
                        id=f"{operation}-{option}-{name}",
                        # Interpreted it takes half a minute; tests/attention has chosen cases.
                        marks=pytest.mark.full if option == "triton" and not is_quick else (),
                    )


def identity(implementation: object) -> str:
    """What in the sources computes an operation: a function, or the class of an object."""
    implementation = getattr(implementation, "func", implementation)  # of a functools.partial
    named = implementation if hasattr(implementation, "__qualname__") else type(implementation)
    return f"{named.__module__}.{named.__qualname__}"


def is_readable(implementation: object) -> bool:
    return "kernels.torch." in identity(implementation)


def test_every_operation_is_compared():
    assert set(OPERATIONS) == COMPARISONS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "option", "dtype"), list(implementations()))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_each_implementation_computes_what_the_reference_does(operation, option, dtype, data):
    kernels, reference = table(option, dtype), table(REFERENCE, dtype)
    COMPARISONS[operation](Case(kernels, reference, dtype, data))


def test_the_table_of_the_library_computes_what_it_names_outside_of_the_reference():
    """What `outdraft doctor` shows: modules of the library, but for what it does not have."""
    named = computed_by(choose_kernels(usable_instruction_sets()[-1], CPU, torch.float32))
    assert named.keys() == set(OPERATIONS)
    assert {module.partition(".")[0] for module in named.values()} == {"native"}
    named = computed_by(choose_kernels(REFERENCE, CPU, torch.float32))
    assert {module.partition(".")[0] for module in named.values()} == {"torch"}
