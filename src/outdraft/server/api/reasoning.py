"""Splits the thoughts of a model from its answer, as the text streams.

DeepSeek R1 and Qwen3 write `<think>`, their thoughts, `</think>`, then the answer. Templates may
write the first of the two marks, or both of them for a model that shall not think.
"""

from dataclasses import replace
from enum import Enum, auto

from tokenizers import Tokenizer

from outdraft.core.errors import ConfigError
from outdraft.core.sampling import SamplingParams
from outdraft.core.structured_outputs import Thoughts
from outdraft.engine.inputs import EncodedPrompt
from outdraft.server.api.bodies import ChatMessage
from outdraft.server.api.calls import CallFinder, Part, whole_calls
from outdraft.server.api.settings import ApiSettings, ReasoningFormat
from outdraft.server.api.tools import CallFormat
from outdraft.text.detokenizer import overlap

START, END = "<think>", "</think>"


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


class AnswerParser:
    """Takes an answer apart as it streams: thoughts, text and calls, in this order of precedence.

    The parts add up to the same for any cuts. Line breaks around thoughts are the format's, and are
    left out.
    """

    def __init__(self, stage: Stage | None, calls: CallFormat | None) -> None:
        """`stage`: where the model begins; None: thoughts are part of the text."""
        self._stage = stage or Stage.ANSWERING
        self._calls = CallFinder(*calls) if calls is not None else None
        self._held = ""  # what may begin a mark, or line breaks
        self._awaits_start = self._stage is not Stage.ANSWERING  # the first mark may come
        self._is_at_start = self._awaits_start  # of the thoughts, or of the answer

    def push(self, text: str, *, is_last: bool) -> list[Part]:
        """Read on, or the end; the parts that no later text can change."""
        self._held += text
        parts: list[Part] = []
        is_certain = not self._awaits_start or self._find_start()
        if is_certain and self._stage is Stage.THINKING:
            self._think(parts)
        if is_certain and self._stage is Stage.ANSWERING:
            self._drop_line_breaks()
            self._answer(parts)
        if is_last and self._held and self._stage is Stage.THINKING:
            parts.append(("thought", self._held))
        elif is_last:
            self._answer(parts)
        return [*parts, *self._calls.push("", is_last=True)] if is_last and self._calls else parts

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

    def _think(self, parts: list[Part]) -> None:
        self._drop_line_breaks()
        before, found, behind = self._held.partition(END)
        certain = before if found else before[: len(before) - overlap(before, END)]
        certain = certain.rstrip("\n")
        if certain:
            parts.append(("thought", certain))
        self._held = self._held[len(certain) :]
        if found:
            self._held = behind
            self._stage, self._is_at_start = Stage.ANSWERING, True

    def _answer(self, parts: list[Part]) -> None:
        if self._calls is not None:
            parts += self._calls.push(self._held)
        elif self._held:
            parts.append(("text", self._held))
        self._held = ""


def whole_answer(
    text: str, stage: Stage | None, calls: CallFormat | None
) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, text and calls (see whole_calls) of an answer; arguments as of AnswerParser."""
    parts = AnswerParser(stage, calls).push(text, is_last=True)
    thoughts = "".join(text for kind, text in parts if kind == "thought")
    return thoughts, "".join(text for kind, text in parts if kind == "text"), whole_calls(parts)
