"""/v1/responses: text in, text out. Nothing is stored."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Response

from outdraft.core.outputs import RequestOutput
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
        generation = new_generation(context, "resp_", [prompt], params, body)
        answer = ResponseAnswer(context, body, generation, model)
        if body.stream:
            retry_after_s = context.settings.retry_after_s
            return EventStream(answer.events(), retry_after_s, answer.error_event)
        return JsonLater(answer.whole())

    return router


@dataclass(slots=True)
class ResponseAnswer:
    """A response under way: one message with one part of text."""

    context: ApiContext
    body: ResponsesRequest
    generation: Generation
    model: str
    created_s: int = field(default_factory=lambda: int(time.time()), init=False)
    message_id: str = field(default_factory=lambda: f"msg_{uuid4().hex}", init=False)
    num_events: int = field(default=0, init=False)

    async def whole(self) -> Json:
        [output] = await outputs(self.context, self.generation)
        return self._finished(output)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """In the order that OpenAI documents; the last one holds the whole response."""
        output = None
        async with aclosing(updates(self.context, self.generation)) as stream:
            async for _, update in stream:
                if output is None:
                    for each in self._opening():
                        yield each
                output = update.output
                for delta in update.deltas:
                    if delta.text or delta.logprobs:
                        rows = content(delta.logprobs or [], self.body.top_logprobs or 0)
                        yield self._event(
                            "response.output_text.delta",
                            **self._place(),
                            delta=delta.text,
                            logprobs=rows,
                        )
        if output is not None:
            for each in self._closing(output):
                yield each

    def error_event(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        body = error.body
        return self._event("error", code=body.code, message=body.message, param=body.param)

    def _opening(self) -> list[bytes]:
        response = self._response("in_progress")
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = self._message("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place(), part=part),
        ]

    def _closing(self, output: RequestOutput) -> list[bytes]:
        response = self._finished(output)
        [item] = response["output"]
        [part] = item["content"]
        text, rows = part["text"], part["logprobs"]
        done = "response.output_text.done"
        return [
            self._event(done, **self._place(), text=text, logprobs=rows),
            self._event("response.content_part.done", **self._place(), part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{response['status']}", response=response),
        ]

    def _event(self, kind: str, **values: Any) -> bytes:
        number = self.num_events
        self.num_events += 1
        return event({"type": kind, "sequence_number": number} | values, kind)

    def _place(self) -> Json:
        return {"item_id": self.message_id, "output_index": 0, "content_index": 0}

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
        is_whole = one.finish_reason == "stop"
        status = "completed" if is_whole else "incomplete"
        part = {
            "type": "output_text",
            "text": one.text,
            "annotations": [],
            "logprobs": content(one.logprobs or [], self.body.top_logprobs or 0),
        }
        result = self._response(status) | {
            "output": [self._message(status, [part])],
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
