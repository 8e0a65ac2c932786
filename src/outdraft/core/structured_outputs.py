"""What form an output must have: as the engine takes it, and as vLLM writes it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from outdraft.core.errors import RequestError, did_you_mean

MAX_STRUCTURED_CHARS = 2**18

StructuredKind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]


@dataclass(frozen=True, slots=True)
class Thoughts:
    """What a model may write before an output of a given form: any text up to `end`.

    `start`: how such a text begins; without it the form begins at once. None: there is such a
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
        if self.behind is not None and not isinstance(self.behind, Thoughts):
            raise RequestError(
                f"behind of structured must be Thoughts, got {self.behind!r:.80}", "structured"
            )
        kinds = get_args(StructuredKind)
        if self.kind not in kinds:
            raise RequestError(
                f"kind of structured must be one of {', '.join(kinds)}, got {self.kind!r}",
                "structured",
            )
        if not isinstance(self.text, str):
            raise RequestError(
                f"text of structured must be a text, got {type(self.text).__name__}", "structured"
            )
        if (self.kind == "json_object") == bool(self.text):
            word = "no" if self.kind == "json_object" else "a"
            raise RequestError(f"structured of kind {self.kind} takes {word} text", "structured")
        if not isinstance(self.disable_any_whitespace, bool):
            raise RequestError(
                "disable_any_whitespace of structured must be true or false", "structured"
            )
        if not self.disable_any_whitespace and not self.kind.startswith("json"):
            raise RequestError(
                f"disable_any_whitespace is of JSON, not of structured of kind {self.kind}",
                "structured",
            )
        if len(self.text) > MAX_STRUCTURED_CHARS:
            raise RequestError(
                f"text of structured has {len(self.text):,} characters, more than "
                f"{MAX_STRUCTURED_CHARS:,}",
                "structured",
            )
        if not self.text.isascii() and any("\ud800" <= char <= "\udfff" for char in self.text):
            raise RequestError("text of structured is not valid Unicode text", "structured")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "StructuredOutput":
        """From JSON-like values.

        Raises:
            RequestError: an unknown name or a wrong value.
        """
        _check_names(cls, values, "structured")
        if "kind" not in values:
            raise RequestError("structured needs a kind", "structured")
        return cls(**values)


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

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "StructuredOutputsParams":
        """From JSON-like values.

        Raises:
            RequestError: an unknown name or a wrong value.
        """
        _check_names(cls, values, "structured_outputs")
        return cls(**values)

    def structured_output(self) -> StructuredOutput:
        """The same as the engine takes it."""
        names = ("json", "regex", "choice", "grammar")
        asked = [name for name in names if getattr(self, name) is not None]
        if self.json_object:
            asked.append("json_object")
        if len(asked) != 1:
            found = f"got {', '.join(asked)}" if asked else "got none"
            raise RequestError(
                f"structured_outputs takes exactly one of {', '.join(names)}, json_object: {found}",
                "structured_outputs",
            )
        flag = self.disable_any_whitespace
        is_compact = True if flag is None else flag
        try:
            return self._structured_output(asked[0], is_compact)
        except RequestError as error:  # it speaks of `structured`
            field = f"structured_outputs.{asked[0]}"
            raise RequestError(f"{field}: {error}", field) from error

    def _structured_output(self, name: str, is_compact: bool) -> StructuredOutput:
        if name == "json_object":
            return StructuredOutput("json_object", disable_any_whitespace=is_compact)
        if name == "json":
            text = self.json if isinstance(self.json, str) else schema_text(self.json)
            return StructuredOutput("json_schema", text, disable_any_whitespace=is_compact)
        # What is said of white space in JSON means nothing here.
        if name == "choice":
            return StructuredOutput("choice", choice_text(self.choice))
        return StructuredOutput("regex" if name == "regex" else "grammar", getattr(self, name))


def schema_text(schema: object) -> str:
    """A JSON schema as text.

    Raises:
        RequestError: it is no JSON.
    """
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the schema is no JSON: {error}", "structured") from error


def choice_text(choices: object) -> str:
    """Texts to choose from, as StructuredOutput takes them.

    Raises:
        RequestError: they are none, or not a list of texts.
    """
    texts: list[Any] = []
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        texts = list(choices)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"a choice must be a list of texts, got {choices!r:.100}", "structured")
    return json.dumps(texts)


def _check_names(
    cls: type[StructuredOutput] | type[StructuredOutputsParams],
    values: Mapping[str, Any],
    field: str,
) -> None:
    """Raises RequestError at the first of `values` that is no attribute."""
    known = {f.name for f in fields(cls)}
    for name in values:
        if name not in known:
            raise RequestError(
                f"unknown name {name!r} in {field}: {did_you_mean(name, known)}", field
            )
