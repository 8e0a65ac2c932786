"""Fields that are flags of the command line, too."""

from dataclasses import field
from typing import Any


def flag(text: str | None = None, *spellings: str, default: Any = None, **settings: Any) -> Any:
    """A field of a dataclass that the command line offers as a flag.

    `text`: its help; `spellings`: none: made of the field's name; `settings`: more of typer.Option.
    All of it is metadata: this needs no library of the command line.
    """
    return field(default=default, metadata={"help": text, "spellings": spellings, **settings})
