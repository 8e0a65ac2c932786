"""An OpenAI-like server that streams a written answer with its trace."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

API_KEY = "test-key"


@dataclass(frozen=True)
class ScriptedStep:
    """One step: its draft, the rows accepted, and the tokens with their origins."""

    tokens: tuple[tuple[str, str], ...]  # text, origin
    drafted: tuple[tuple[str, str], ...] = ()  # text, source
    parents: tuple[int, ...] = ()
    accepted_rows: tuple[int, ...] = ()
    seconds: float = 0.0124
    logprobs: tuple[float, ...] = ()  # of the drafted tokens, then of the target's own

    def trace(self) -> dict[str, Any]:
        return {
            "tokens": [{"text": text, "origin": origin} for text, origin in self.tokens],
            "steps": [
                {
                    "source": self.drafted[0][1] if self.drafted else None,
                    "drafted": self._drafted(),
                    "parents": list(self.parents),
                    "accepted_rows": list(self.accepted_rows),
                    "num_emitted": len(self.tokens),
                    "seconds": self.seconds,
                }
            ],
        }

    def _drafted(self) -> list[dict[str, Any]]:
        drafted = [{"text": text, "source": source} for text, source in self.drafted]
        if not self.logprobs:
            return drafted
        pairs = zip(drafted, self.logprobs[: len(drafted)], strict=True)
        return [token | {"logprob": logprob} for token, logprob in pairs]

    def answer_logprobs(self, *, is_chat: bool) -> dict[str, Any]:
        """As the API has them, of the tokens that were emitted; nothing if there are none."""
        if not self.logprobs:
            return {}
        kept = [self.logprobs[row] for row in self.accepted_rows] + [self.logprobs[-1]]
        if is_chat:
            return {"logprobs": {"content": [{"logprob": logprob} for logprob in kept]}}
        return {"logprobs": {"token_logprobs": kept}}


def chain(
    source: str, drafted: list[str], accepted: int, own: str, seconds: float = 0.0124
) -> ScriptedStep:
    """A step whose chain was accepted up to `accepted`, and the target's own token behind it."""
    kept = tuple((text, source) for text in drafted[:accepted])
    origin = "bonus" if accepted == len(drafted) else "recovered"
    return ScriptedStep(
        (*kept, (own, origin)),
        tuple((text, source) for text in drafted),
        tuple(range(len(drafted))),
        tuple(range(accepted)),
        seconds,
    )


ANSWER = (
    ScriptedStep((("if", "plain"),), seconds=0.0312),
    chain("draft_model", [" n", " <", " 0"], 2, " 2"),
    chain("ngram", [":", "\n        "], 2, "return"),
    chain("suffix", [" n", "\n", "    ", "return", " n"], 4, " fibonacci", 0.0141),
    chain("suffix", ["(", "n", " - ", "1", ")"], 5, " + ", 0.0139),
    chain("prediction", ["fibonacci", "(", "n", " - ", "1"], 4, "2", 0.0145),
    ScriptedStep(  # a tree: two guesses for the same place, the second one right
        ((")", "draft_model"), ("\n", "bonus")),
        (("]", "draft_model"), (")", "draft_model"), (" +", "draft_model")),
        (0, 0, 1),
        (1,),
    ),
)
MIXED = ScriptedStep(  # a head goes on, as a tree, behind what the suffix tree found
    (("a", "suffix"), ("b", "suffix"), ("d", "eagle3"), ("f", "recovered")),
    (("a", "suffix"), ("b", "suffix"), ("c", "eagle3"), ("d", "eagle3"), ("e", "eagle3")),
    (0, 1, 2, 2, 4),
    (0, 1, 3),
)
LIKELY = ScriptedStep(  # a tree with the probabilities 3/4, 1/8, 1/2, 1/1000 and 1/4
    (("x", "medusa"), ("z", "recovered")),
    (("x", "medusa"), ("y", "medusa"), ("p", "medusa"), ("q", "medusa")),
    (0, 0, 1, 1),
    (0,),
    logprobs=tuple(math.log(share) for share in (3 / 4, 1 / 8, 1 / 2, 1 / 1000, 1 / 4)),
)
HEADS = tuple(
    chain(source, [source], 1, ".")
    for source in ("eagle", "eagle3", "medusa", "mlp_speculator", "dflash", "dspark", "mtp", "self")
)
TEXT = "".join(text for step in ANSWER for text, _ in step.tokens)


@dataclass
class FakeOpenAi:
    """The server.

    Attributes:
        answer: what it streams; without speculation the same text token by token.
        plain_end: what it adds without speculation: a server that breaks its promise.
        delay_s: before every step.
        breaks_after: steps, then comes an error.
        bodies: route and body of the requests it was sent, in order.
    """

    answer: tuple[ScriptedStep, ...] = ANSWER
    plain_end: str = ""
    delay_s: float = 0.0
    breaks_after: int | None = None
    needs_key: bool = False
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def router(self) -> APIRouter:
        router = APIRouter()

        @router.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": "scripted", "object": "model"}]}

        @router.post("/v1/{route:path}")
        async def complete(route: str, request: Request) -> Response:
            if self.needs_key and request.headers.get("authorization") != f"Bearer {API_KEY}":
                error = {"message": "Incorrect API key provided", "type": "x", "code": None}
                return JSONResponse({"error": error}, 401)
            body = await request.json()
            self.bodies.append((route, body))
            stream = self._stream(route, body)
            return StreamingResponse(stream, media_type="text/event-stream")

        return router

    async def _stream(self, route: str, body: dict[str, Any]) -> AsyncIterator[str]:
        is_chat = route == "chat/completions"
        steps = self.answer
        if body["speculation"].get("enabled") is False:
            texts = [text for step in steps for text, _ in step.tokens] + [self.plain_end] * bool(
                self.plain_end
            )
            steps = tuple(ScriptedStep(((text, "plain"),), seconds=0.0118) for text in texts)
        for step in steps[: self.breaks_after]:
            await asyncio.sleep(self.delay_s)
            text = "".join(text for text, _ in step.tokens)
            content = {"delta": {"content": text}} if is_chat else {"text": text}
            choice = {"index": 0, **content, "finish_reason": None, "outdraft": step.trace()}
            choice |= step.answer_logprobs(is_chat=is_chat)
            yield _data({"choices": [choice]})
        if self.breaks_after is not None:
            yield _data({"error": {"message": "the engine died", "type": "x", "code": None}})
            return
        end = {"delta": {}} if is_chat else {"text": ""}
        yield _data({"choices": [{"index": 0, **end, "finish_reason": "stop"}]})
        num_tokens = sum(len(step.tokens) for step in steps)
        yield _data({"choices": [], "usage": {"completion_tokens": num_tokens}})
        yield "data: [DONE]\n\n"


def _data(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
