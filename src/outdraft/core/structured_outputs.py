"""The form that an output must have: as the engine takes it, and as vLLM writes it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from outdraft.core.errors import RequestError

MAX_STRUCTURED_CHARS = 2**18

StructuredKind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Text that a model may write before an output of a given form: any text up to `end`.

    `start`: the beginning of such a text; without it the form begins at once. None: there is such a
    text always, and the prompt has begun it.
    """

    end: str
    start: str | None = None

    def __post_init__(self) -> None:
        for name, mark in (("end", self.end), ("start", self.start)):
            if mark is not None and (not isinstance(mark, str) or not mark):
                raise RequestError(f"{name} of thoughts must be a text, got {mark!r}", "structured")


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that an output must have.

    Attributes:
        kind: "json_object" for any JSON object; else what `text` is: a JSON schema, a regular
            expression that the whole output matches, a grammar in Lark's or GBNF's notation, or a
            JSON list of the texts that the output may be.
        disable_any_whitespace: JSON is written without white space between its parts. False: the
            model may put a blank there, or a line break and what the next line is indented by.
    """

    kind: StructuredKind
    text: str = ""
    behind: Thoughts | None = None
    disable_any_whitespace: bool = True

    def __post_init__(self) -> None:
        if (wrong := self._what_is_wrong()) is not None:
            raise RequestError(wrong, "structured")

    def _what_is_wrong(self) -> str | None:
        if self.behind is not None and not isinstance(self.behind, Thoughts):
            return f"behind of structured must be Thoughts, got {self.behind!r:.80}"
        kinds = get_args(StructuredKind)
        if self.kind not in kinds:
            return f"kind of structured must be one of {', '.join(kinds)}, got {self.kind!r}"
        if not isinstance(self.text, str):
            return f"text of structured must be a text, got {type(self.text).__name__}"
        if (self.kind == "json_object") == bool(self.text):
            word = "no" if self.kind == "json_object" else "a"
            return f"structured of kind {self.kind} takes {word} text"
        if not isinstance(self.disable_any_whitespace, bool):
            return "disable_any_whitespace of structured must be true or false"
        if not self.disable_any_whitespace and not self.kind.startswith("json"):
            return f"disable_any_whitespace is of JSON, not of structured of kind {self.kind}"
        if len(self.text) > MAX_STRUCTURED_CHARS:
            most = f"{MAX_STRUCTURED_CHARS:,}"
            return f"text of structured has {len(self.text):,} characters, more than {most}"
        if not self.text.isascii() and any("\ud800" <= char <= "\udfff" for char in self.text):
            return "text of structured is not valid Unicode text"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an output must have, with vLLM's names: exactly one of the first five.

    Unlike vLLM's, JSON has no white space between its parts unless it is asked for.

    Attributes:
        json: a JSON schema, as text or as a mapping.
        choice: the texts that the output may be.
        disable_any_whitespace: False: JSON may have white space, within bounds. None: it has none.

    Raises:
        RequestError: none or several of them, or a wrong value.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None

    def __post_init__(self) -> None:
        self.structured_output()

    def structured_output(self) -> StructuredOutput:
        """The form as the engine takes it."""
        asked = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(asked) != 1:
            found = f"got {', '.join(asked)}" if asked else "got none"
            names = ", ".join(KINDS)
            raise RequestError(
                f"structured_outputs takes exactly one of {names}: {found}", "structured_outputs"
            )
        [name] = asked
        return form_of(
            f"structured_outputs.{name}",
            KINDS[name],
            getattr(self, name),
            self.disable_any_whitespace,
        )


KINDS: dict[str, StructuredKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}


def form_of(
    field: str, kind: StructuredKind, value: Any, disable_any_whitespace: bool | None = None
) -> StructuredOutput:
    """The form that a field asks for; the flag for white space matters for JSON only.

    Raises:
        RequestError: it is wrong; the field is named.
    """
    is_compact = disable_any_whitespace
    if is_compact is None or not kind.startswith("json"):
        is_compact = True
    try:
        return StructuredOutput(kind, _text(kind, value), disable_any_whitespace=is_compact)
    except RequestError as error:  # it speaks of `structured`
        raise RequestError(f"{field}: {error}", field) from error


def _text(kind: StructuredKind, value: Any) -> Any:
    if kind == "json_object":
        return ""
    if kind == "choice":
        texts = [] if isinstance(value, str) or not isinstance(value, Sequence) else list(value)
        if not texts or not all(isinstance(text, str) for text in texts):
            message = f"a choice must be a list of texts, got {value!r:.100}"
            raise RequestError(message, "structured")
        return json.dumps(texts)
    if kind != "json_schema" or isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the schema is no JSON: {error}", "structured") from error
