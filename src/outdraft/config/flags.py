"""What the command line must know of a field to offer it as a flag; no library of it is needed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the command line."""

    text: str | None  # its help
    spellings: tuple[str, ...]  # none: made of the field's name
    settings: Mapping[str, Any]  # more of typer.Option


def flag(text: str | None = None, *spellings: str, default: Any = None, **settings: Any) -> Any:
    """A field of a dataclass that is a flag, too; arguments as of Flag."""
    return field(default=default, metadata={"flag": Flag(text, spellings, settings)})
