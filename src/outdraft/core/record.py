"""Values that each step makes."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Kind = TypeVar("Kind")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(kind: type[Kind]) -> type[Kind]:
    """A dataclass whose fields never change.

    Only the type checker says so. A frozen dataclass refuses it at run time too, but takes three
    times as long to make, and a step of a small model makes 20 of them.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)
