"""Splits the thoughts of a model from its answer, as the text streams.

DeepSeek R1 and Qwen3 write `<think>`, their thoughts, `</think>`, then the answer. Templates may
write the first of the two marks, or both of them for a model that shall not think.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto

from tokenizers import Tokenizer

from outdraft.core.errors import ConfigError
from outdraft.core.sampling import SamplingParams
from outdraft.core.structured_outputs import Thoughts
from outdraft.engine.inputs import EncodedPrompt
from outdraft.server.api.bodies import ChatMessage
from outdraft.server.api.calls import CallArguments, CallName, ParsedCall, whole_calls
from outdraft.server.api.settings import ApiSettings, ReasoningFormat
from outdraft.server.api.tools import CallFormat, tool_call_parser
from outdraft.text.detokenizer import overlap

START, END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of what the model thinks."""

    text: str


class Stage(Enum):
    """The part of its output that the model writes. UNKNOWN: it may think first or not."""

    UNKNOWN = auto()
    THINKING = auto()
    ANSWERING = auto()


def check_marks(tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError if the marks never come as text, as special tokens do not."""
    if tokenizer is None:
        raise ConfigError("--reasoning-parser needs a tokenizer, and the model came without one")
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.content in (START, END) and token.special:
            raise ConfigError(
                f"--reasoning-parser reads {token.content} in the text, but the tokenizer makes "
                "it a special token, which texts leave out"
            )


def stage_after(prompt: str, continued: str | None, format_: ReasoningFormat) -> Stage:
    """The stage in which a model goes on after a prompt.

    `continued` is the message that the prompt ends within, None: it ends with a new one.
    """
    if continued:
        is_open = continued.rfind(START) > continued.rfind(END)
        return Stage.THINKING if is_open else Stage.ANSWERING
    end = prompt.rstrip()
    if end.endswith(START):
        return Stage.THINKING
    if end.endswith(END):
        return Stage.ANSWERING
    # DeepSeek R1 thinks always, and leaves the first mark out now and then.
    return Stage.THINKING if format_ == "deepseek_r1" else Stage.UNKNOWN


def first_stage(
    settings: ApiSettings, prompt: EncodedPrompt, continued: ChatMessage | None = None
) -> Stage | None:
    """The stage in which the model begins its answer; None: thoughts are part of the text.

    `continued` is the message that the prompt ends within, None: it ends with a new one.
    """
    if settings.reasoning_parser is None:
        return None
    content = continued.content if continued is not None else None
    if content is not None and not isinstance(content, str):
        content = "".join(part.text for part in content)
    return stage_after(prompt.text or "", content, settings.reasoning_parser)


def with_form_after_thoughts(params: SamplingParams, stage: Stage | None) -> SamplingParams:
    """The parameters, with the form of the output, if they ask for one, for the answer alone."""
    if params.structured is None or stage in (None, Stage.ANSWERING):
        return params
    thoughts = Thoughts(end=END, start=START if stage is Stage.UNKNOWN else None)
    return replace(params, structured=replace(params.structured, behind=thoughts))


class ReasoningParser:
    """Splits thoughts from the text after them. The pieces add up to the same for any cuts.

    Line breaks around thoughts are the format's, and are left out.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._held = ""  # what may begin a mark, or line breaks
        self._awaits_start = stage is not Stage.ANSWERING  # the first mark may come
        self._is_at_start = stage is not Stage.ANSWERING  # of the thoughts, or of the answer

    def push(self, text: str) -> list[Thought | str]:
        """Read on; the pieces that no later text can change."""
        self._held += text
        pieces: list[Thought | str] = []
        if self._awaits_start and not self._find_start():
            return []
        if self._stage is Stage.THINKING:
            self._think(pieces)
        if self._stage is Stage.ANSWERING:
            self._answer(pieces)
        return pieces

    def finish(self) -> list[Thought | str]:
        """End the output; the pieces that remain."""
        held, self._held = self._held, ""
        if not held:
            return []
        return [Thought(held) if self._stage is Stage.THINKING else held]

    def _find_start(self) -> bool:
        """Take the first mark off, if it is there; False: that is not certain yet."""
        begin = self._held.lstrip()
        if begin != START and START.startswith(begin):
            return False
        self._awaits_start = False
        if begin.startswith(START):
            self._stage, self._held = Stage.THINKING, begin.removeprefix(START)
        elif self._stage is Stage.UNKNOWN:
            self._stage, self._is_at_start = Stage.ANSWERING, False
        return True

    def _drop_line_breaks(self) -> None:
        if self._is_at_start:
            self._held = self._held.lstrip("\n")
            self._is_at_start = not self._held

    def _think(self, pieces: list[Thought | str]) -> None:
        self._drop_line_breaks()
        before, found, behind = self._held.partition(END)
        certain = before if found else before[: len(before) - overlap(before, END)]
        certain = certain.rstrip("\n")
        if certain:
            pieces.append(Thought(certain))
        self._held = self._held[len(certain) :]
        if found:
            self._held = behind
            self._stage, self._is_at_start = Stage.ANSWERING, True

    def _answer(self, pieces: list[Thought | str]) -> None:
        self._drop_line_breaks()
        if self._held:
            pieces.append(self._held)
            self._held = ""


Part = Thought | str | CallName | CallArguments


class AnswerParser:
    """Takes an answer apart as it streams: thoughts, text and calls, in this order of precedence.

    Without parsers all of it is text.
    """

    def __init__(self, stage: Stage | None, calls: CallFormat | None) -> None:
        """`stage`: where the model begins; None: thoughts are part of the text."""
        self._thoughts = ReasoningParser(stage or Stage.ANSWERING)
        self._calls = tool_call_parser(calls) if calls is not None else None

    def push(self, text: str, *, is_last: bool) -> list[Part]:
        """Read on, or the end; the parts that no later text can change."""
        pieces = self._thoughts.push(text)
        pieces += self._thoughts.finish() if is_last else []
        if self._calls is None:
            return [*pieces]
        parts: list[Part] = []
        for piece in pieces:
            parts += [piece] if isinstance(piece, Thought) else self._calls.push(piece)
        return [*parts, *self._calls.finish()] if is_last else parts


def whole_answer(
    text: str, stage: Stage | None, calls: CallFormat | None
) -> tuple[str, str, list[ParsedCall]]:
    """Thoughts, text and calls of an answer that has ended; arguments as of AnswerParser."""
    parts = AnswerParser(stage, calls).push(text, is_last=True)
    return (
        "".join(part.text for part in parts if isinstance(part, Thought)),
        "".join(part for part in parts if isinstance(part, str)),
        whole_calls(parts),
    )
