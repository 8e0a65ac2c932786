"""The parts of one answer: thoughts, text and calls of functions, in this order of precedence."""

from outdraft.server.api.reasoning import ReasoningParser, Stage, Thought
from outdraft.server.api.tools import CallFormat, ParsedCall, tool_call_parser

Part = Thought | str | ParsedCall


class AnswerParser:
    """Takes an answer apart as it streams; without parsers all of it is text."""

    def __init__(self, stage: Stage | None, calls: CallFormat | None) -> None:
        """`stage`: where the model begins; None: thoughts are part of the text."""
        self._thoughts = ReasoningParser(stage) if stage is not None else None
        self._calls = tool_call_parser(calls) if calls is not None else None

    def push(self, text: str) -> list[Part]:
        """What is certain now that the answer goes on with `text`."""
        if self._thoughts is None:
            return self._parsed([text] if text else [])
        return self._parsed(self._thoughts.push(text))

    def finish(self) -> list[Part]:
        """What remains, now that the answer has ended."""
        parts = self._parsed(self._thoughts.finish()) if self._thoughts is not None else []
        return [*parts, *self._calls.finish()] if self._calls is not None else parts

    def _parsed(self, pieces: list[Thought | str]) -> list[Part]:
        if self._calls is None:
            return [*pieces]
        parts: list[Part] = []
        for piece in pieces:
            parts += [piece] if isinstance(piece, Thought) else self._calls.push(piece)
        return parts
