"""/v1/responses: text in, text out. Nothing is stored."""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Response

from outdraft.core.errors import RequestError
from outdraft.core.outputs import RequestOutput
from outdraft.server.api.answers import Answer, Json
from outdraft.server.api.bodies import ResponsesRequest
from outdraft.server.api.calls import Part
from outdraft.server.api.errors import ApiError
from outdraft.server.api.params import check_numbers, sampling_params, wants_metrics
from outdraft.server.api.prompts import encode_chat, input_messages, model_name
from outdraft.server.api.reasoning import (
    AnswerParser,
    Stage,
    first_stage,
    whole_answer,
    with_form_after_thoughts,
)
from outdraft.server.api.replies import event
from outdraft.server.api.reports import Row, TokenNames, content, metrics, usage
from outdraft.server.api.settings import ApiContext


def add_responses_route(router: APIRouter, context: ApiContext) -> None:
    @router.post("/v1/responses", operation_id="create_response")
    async def create(body: ResponsesRequest) -> Response:
        """Answer a text or a conversation."""
        model = model_name(context, body.model)
        check_numbers(body, context.settings)
        params = sampling_params(
            body,
            context,
            max_tokens=body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if body.includes_logprobs else None,
        )
        chat: Json = {"messages": input_messages(body.input, body.instructions)}
        if body.reasoning is not None and body.reasoning.effort is not None:
            chat["variables"] = {"reasoning_effort": body.reasoning.effort}
        prompt = await encode_chat(context, body, chat, params.max_tokens, "input")
        stage = first_stage(context.settings, prompt)
        if stage is not None and body.includes_logprobs:
            raise RequestError("include needs a server without --reasoning-parser", "include")
        params = with_form_after_thoughts(params, stage)
        return ResponseAnswer(context, body, model, [prompt], params, stage).reply()


@dataclass(slots=True)
class ResponseAnswer(Answer[ResponsesRequest]):
    """A response: one message with one part of text, and before it the thoughts, if the
    server splits them from the text.
    """

    prefix = "resp_"

    stage: Stage | None  # where the model begins; None: thoughts are part of the text
    message_id: str = field(default_factory=lambda: f"msg_{uuid4().hex}", init=False)
    thoughts_id: str = field(default_factory=lambda: f"rs_{uuid4().hex}", init=False)
    num_events: int = field(default=0, init=False)
    thoughts: str = field(default="", init=False)  # that events have brought
    is_message_open: bool = field(default=False, init=False)

    async def whole(self) -> Json:
        [output] = await self.outputs()
        return self._finished(output)

    async def events(self) -> AsyncGenerator[bytes]:
        """In the order that OpenAI documents; the last one holds the whole response."""
        output, parser = None, AnswerParser(self.stage, None)
        async with aclosing(self.updates()) as stream:
            async for _, update in stream:
                events = list(self._opening()) if output is None else []
                output = update.output
                for delta in update.deltas:
                    parts: list[Part] = [("text", delta.text)]
                    if self.stage is not None:
                        parts = parser.push(delta.text, is_last=delta.finish_reason is not None)
                    events += self._told(parts, self._logprobs(delta.logprobs))
                for each in events:
                    yield each
        assert output is not None, "a request that is not accepted raises"
        for each in self._closing(output):
            yield each

    def error_event(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        body = error.body
        return self._event("error", code=body.code, message=body.message, param=body.param)

    def _opening(self) -> Iterator[bytes]:
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        if self.stage is None:
            yield from self._message_opening()

    def _told(self, parts: list[Part], rows: list[Json]) -> Iterator[bytes]:
        """Events of new thoughts and new text; `rows` are the text's."""
        for kind, text in parts:
            if kind == "thought":
                if not self.thoughts:
                    yield from self._added(self._thoughts_item(""))
                self.thoughts += text
                place = self._place(self.thoughts_id)
                yield self._event("response.reasoning_text.delta", **place, delta=text)
            elif text or rows:
                if not self.is_message_open:
                    yield from self._message_opening()
                place = self._place(self.message_id)
                event_kind = "response.output_text.delta"
                yield self._event(event_kind, **place, delta=text, logprobs=rows)

    def _message_opening(self) -> Iterator[bytes]:
        """Events of the message's beginning, and of the thoughts' end before it."""
        self.is_message_open = True
        if self.thoughts:
            yield from self._done(self._thoughts_item(self.thoughts), text=self.thoughts)
        yield from self._added(self._message("in_progress", "", []))

    def _closing(self, output: RequestOutput) -> Iterator[bytes]:
        if not self.is_message_open:
            yield from self._message_opening()
        response = self._finished(output)
        item = response["output"][-1]
        [part] = item["content"]
        yield from self._done(item, text=part["text"], logprobs=part["logprobs"])
        yield self._event(f"response.{response['status']}", response=response)

    def _added(self, item: Json) -> Iterator[bytes]:
        """Events of the beginning of an item, and of its only part."""
        place = self._place(item["id"])
        [part] = item["content"]
        index, begun = place["output_index"], item | {"status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.content_part.added", **place, part=part)

    def _done(self, item: Json, **whole: Any) -> Iterator[bytes]:
        """Events of the end of an item; `whole`: what its part's deltas add up to."""
        place = self._place(item["id"])
        [part] = item["content"]
        index = place["output_index"]
        yield self._event(f"response.{part['type']}.done", **place, **whole)
        yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **values: Any) -> bytes:
        number = self.num_events
        self.num_events += 1
        return event({"type": kind, "sequence_number": number} | values, kind)

    def _place(self, item_id: str) -> Json:
        """The place of an item's part: the message comes after the thoughts, if there are some."""
        index = 1 if self.thoughts and item_id == self.message_id else 0
        return {"item_id": item_id, "output_index": index, "content_index": 0}

    def _thoughts_item(self, text: str) -> Json:
        item = {"id": self.thoughts_id, "type": "reasoning", "summary": list[Json]()}
        part = {"type": "reasoning_text", "text": text}
        return item | {"content": [part], "status": "completed"}

    def _message(self, status: str, text: str, rows: list[Json]) -> Json:
        item = {"id": self.message_id, "type": "message", "role": "assistant"}
        part = {"type": "output_text", "text": text, "annotations": list[Json](), "logprobs": rows}
        return item | {"status": status, "content": [part]}

    def _finished(self, output: RequestOutput) -> Json:
        [one] = output.outputs
        thoughts, text, _ = whole_answer(one.text, self.stage, None)
        before = [self._thoughts_item(thoughts)] if thoughts else []
        is_whole = one.finish_reason == "stop"
        status = "completed" if is_whole else "incomplete"
        message = self._message(status, text, self._logprobs(one.logprobs))
        result = self._response(status) | {
            "output": [*before, message],
            "usage": _usage(output),
        }
        if is_whole:
            result["completed_at"] = int(time.time())
        elif one.finish_reason == "length":
            result["incomplete_details"] = {"reason": "max_output_tokens"}
        if wants_metrics(self.body):
            result["metrics"] = metrics(output)
        return result

    def _logprobs(self, rows: list[Row] | None) -> list[Json]:
        names = TokenNames(self.tokenizer)
        return content(rows or [], self.body.top_logprobs or 0, names)

    def _response(self, status: str) -> Json:
        body, params = self.body, self.params
        format_ = body.text.format if body.text is not None else None
        shown = format_.model_dump(by_alias=True) if format_ is not None else {"type": "text"}
        return {
            "id": self.request_id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": shown},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": {},
        }


def _usage(output: RequestOutput) -> Json:
    counts = usage([output])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"] | {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
