"""/v1/responses: text in, text out. Nothing is stored."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Response

from outdraft.core.errors import RequestError
from outdraft.core.outputs import RequestOutput
from outdraft.server.api.answer_parser import AnswerParser, Part
from outdraft.server.api.errors import ApiError
from outdraft.server.api.generation import Generation, new_generation, outputs, updates
from outdraft.server.api.guard import guarded_router
from outdraft.server.api.logprobs import content
from outdraft.server.api.params import sampling_params, wants_metrics
from outdraft.server.api.prompts import (
    Conversation,
    encode_chat,
    input_messages,
    model_name,
    prompt_options,
)
from outdraft.server.api.reasoning import Stage, Thought, first_stage, with_form_behind_thoughts
from outdraft.server.api.replies import EventStream, JsonLater, event
from outdraft.server.api.reports import metrics, usage
from outdraft.server.api.responses_types import ResponsesRequest
from outdraft.server.api.settings import ApiContext

Json = dict[str, Any]


def responses_router(context: ApiContext) -> APIRouter:
    router = guarded_router(context)

    @router.post("/v1/responses", operation_id="create_response")
    async def create(body: ResponsesRequest) -> Response:
        """Answer a text or a conversation."""
        model = model_name(context, body.model)
        params = sampling_params(
            body,
            context.settings,
            max_tokens=body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if body.include else None,
        )
        messages = input_messages(body.input, body.instructions)
        options = prompt_options(context, body, params.max_tokens, adds_special_tokens=False)
        chat = Conversation(messages=messages, field="input")
        prompt = await encode_chat(context, chat, options)
        stage = first_stage(context.settings, prompt)
        if stage is not None:
            if body.include:
                raise RequestError("include needs a server without --reasoning-parser", "include")
            params = with_form_behind_thoughts(params, stage)
        generation = new_generation(context, "resp_", [prompt], params, body)
        answer = ResponseAnswer(context, body, generation, model, stage)
        if body.stream:
            retry_after_s = context.settings.retry_after_s
            return EventStream(answer.events(), retry_after_s, answer.error_event)
        return JsonLater(answer.whole())

    return router


@dataclass(slots=True)
class ResponseAnswer:
    """A response under way: one message with one part of text, and before it the thoughts, if the
    server tells them apart.

    Attributes:
        stage: where the model begins; None: thoughts are part of the text.
    """

    context: ApiContext
    body: ResponsesRequest
    generation: Generation
    model: str
    stage: Stage | None = None
    created_s: int = field(default_factory=lambda: int(time.time()), init=False)
    message_id: str = field(default_factory=lambda: f"msg_{uuid4().hex}", init=False)
    thoughts_id: str = field(default_factory=lambda: f"rs_{uuid4().hex}", init=False)
    num_events: int = field(default=0, init=False)
    thoughts: str = field(default="", init=False)  # that were told of in events
    is_message_open: bool = field(default=False, init=False)

    async def whole(self) -> Json:
        [output] = await outputs(self.context, self.generation)
        return self._finished(output)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """In the order that OpenAI documents; the last one holds the whole response."""
        output = None
        parser = AnswerParser(self.stage, None) if self.stage is not None else None
        async with aclosing(updates(self.context, self.generation)) as stream:
            async for _, update in stream:
                if output is None:
                    for each in self._opening():
                        yield each
                output = update.output
                for delta in update.deltas:
                    parts: list[Part] = [delta.text] if parser is None else parser.push(delta.text)
                    if parser is not None and delta.finish_reason is not None:
                        parts += parser.finish()
                    rows = content(delta.logprobs or [], self.body.top_logprobs or 0)
                    for each in self._told(parts, rows):
                        yield each
        if output is not None:
            for each in self._closing(output):
                yield each

    def error_event(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        body = error.body
        return self._event("error", code=body.code, message=body.message, param=body.param)

    def _opening(self) -> list[bytes]:
        response = self._response("in_progress")
        opening = [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]
        return opening + self._message_opening() if self.stage is None else opening

    def _told(self, parts: list[Part], rows: list[Json]) -> list[bytes]:
        """Events of new thoughts and new text; `rows` are the text's."""
        events: list[bytes] = []
        for part in parts:
            if isinstance(part, Thought):
                events += self._thinking(part.text)
            elif isinstance(part, str) and (part or rows):
                events += [] if self.is_message_open else self._message_opening()
                kind = "response.output_text.delta"
                events.append(self._event(kind, **self._place(), delta=part, logprobs=rows))
        return events

    def _thinking(self, text: str) -> list[bytes]:
        place = self._thoughts_place()
        events: list[bytes] = []
        if not self.thoughts:
            item, part = self._thoughts_item(None), {"type": "reasoning_text", "text": ""}
            added = "response.content_part.added"
            events = [
                self._event("response.output_item.added", output_index=0, item=item),
                self._event(added, **place, part=part),
            ]
        self.thoughts += text
        return [*events, self._event("response.reasoning_text.delta", **place, delta=text)]

    def _message_opening(self) -> list[bytes]:
        """Events of the message's beginning, and of the thoughts' end before it."""
        self.is_message_open = True
        events: list[bytes] = []
        if self.thoughts:
            place, item = self._thoughts_place(), self._thoughts_item(self.thoughts)
            [part] = item["content"]
            events = [
                self._event("response.reasoning_text.done", **place, text=self.thoughts),
                self._event("response.content_part.done", **place, part=part),
                self._event("response.output_item.done", output_index=0, item=item),
            ]
        place = self._place()
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item, index = self._message("in_progress", []), place["output_index"]
        return [
            *events,
            self._event("response.output_item.added", output_index=index, item=item),
            self._event("response.content_part.added", **place, part=part),
        ]

    def _closing(self, output: RequestOutput) -> list[bytes]:
        opening = [] if self.is_message_open else self._message_opening()
        response = self._finished(output)
        item, place = response["output"][-1], self._place()
        [part] = item["content"]
        text, rows = part["text"], part["logprobs"]
        done = "response.output_text.done"
        index = place["output_index"]
        return [
            *opening,
            self._event(done, **place, text=text, logprobs=rows),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=index, item=item),
            self._event(f"response.{response['status']}", response=response),
        ]

    def _event(self, kind: str, **values: Any) -> bytes:
        number = self.num_events
        self.num_events += 1
        return event({"type": kind, "sequence_number": number} | values, kind)

    def _place(self) -> Json:
        index = 1 if self.thoughts else 0
        return {"item_id": self.message_id, "output_index": index, "content_index": 0}

    def _thoughts_place(self) -> Json:
        return {"item_id": self.thoughts_id, "output_index": 0, "content_index": 0}

    def _thoughts_item(self, text: str | None) -> Json:
        """None: they have only begun."""
        parts = [] if text is None else [{"type": "reasoning_text", "text": text}]
        status = "in_progress" if text is None else "completed"
        summary: list[Json] = []
        return {
            "id": self.thoughts_id,
            "type": "reasoning",
            "summary": summary,
            "content": parts,
            "status": status,
        }

    def _message(self, status: str, parts: list[Json]) -> Json:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": parts,
        }

    def _finished(self, output: RequestOutput) -> Json:
        [one] = output.outputs
        thoughts, text = "", one.text
        if self.stage is not None:
            parser = AnswerParser(self.stage, None)
            parsed = [*parser.push(one.text), *parser.finish()]
            thoughts = "".join(each.text for each in parsed if isinstance(each, Thought))
            text = "".join(each for each in parsed if isinstance(each, str))
        before = [self._thoughts_item(thoughts)] if thoughts else []
        is_whole = one.finish_reason == "stop"
        status = "completed" if is_whole else "incomplete"
        part = {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": content(one.logprobs or [], self.body.top_logprobs or 0),
        }
        result = self._response(status) | {
            "output": [*before, self._message(status, [part])],
            "usage": _usage(output),
        }
        if is_whole:
            result["completed_at"] = int(time.time())
        elif one.finish_reason == "length":
            result["incomplete_details"] = {"reason": "max_output_tokens"}
        if wants_metrics(self.body):
            result["metrics"] = metrics(output)
        return result

    def _response(self, status: str) -> Json:
        body, params = self.body, self.generation.params
        format_ = body.text.format if body.text is not None else None
        shown = format_.model_dump(by_alias=True) if format_ is not None else {"type": "text"}
        return {
            "id": self.generation.request_id,
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
