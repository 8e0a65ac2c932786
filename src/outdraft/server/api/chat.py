"""/v1/chat/completions."""

from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Response

from outdraft.core.errors import RequestError
from outdraft.core.outputs import CompletionOutput, RequestOutput
from outdraft.server.api.answers import ChoicesAnswer, Json, check_stream_options
from outdraft.server.api.bodies import ChatRequest
from outdraft.server.api.calls import Part
from outdraft.server.api.params import check_numbers, sampling_params
from outdraft.server.api.prompts import conversation, encode_chat, model_name
from outdraft.server.api.reasoning import (
    AnswerParser,
    Stage,
    first_stage,
    whole_answer,
    with_form_after_thoughts,
)
from outdraft.server.api.reports import Row, content, prompt_logprobs
from outdraft.server.api.settings import ApiContext
from outdraft.server.api.tools import (
    CallFormat,
    active_tools,
    call_format,
    hides_calls,
)


def add_chat_route(router: APIRouter, context: ApiContext) -> None:
    @router.post("/v1/chat/completions", operation_id="create_chat_completion")
    async def create(body: ChatRequest) -> Response:
        """Continue a conversation."""
        model = model_name(context, body.model)
        check_stream_options(body)
        check_numbers(body, context.settings)
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        params = sampling_params(
            body,
            context,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        tools = active_tools(body)
        calls = call_format(body, tools, context.settings)
        if hides_calls(calls, context.inputs.tokenizer):
            params = replace(params, skip_special_tokens=False)
        chat = conversation(body, tools)
        prompt = await encode_chat(context, body, chat, params.max_tokens)
        continued = body.messages[-1] if body.continue_final_message else None
        stage = first_stage(context.settings, prompt, continued)
        params = with_form_after_thoughts(params, stage)
        return ChatAnswer(context, body, model, [prompt], params, stage, calls).reply()


@dataclass(slots=True)
class ChatAnswer(ChoicesAnswer[ChatRequest]):
    """An answer whose choices are messages."""

    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    opens_at_once = True

    stage: Stage | None
    format: CallFormat | None
    parsers: dict[int, AnswerParser] = field(default_factory=dict)  # of the choices that stream
    num_calls: dict[int, int] = field(default_factory=dict)  # that have begun

    def head(self, output: RequestOutput) -> Json:
        result: Json = {}
        if self.body.prompt_logprobs is not None:
            result["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.body.return_token_ids:
            result["prompt_token_ids"] = output.prompt_token_ids
        return result

    def opening(self, number: int, one: CompletionOutput, output: RequestOutput) -> Json:
        return _piece(one.index, {"role": "assistant", "content": ""})

    def pieces(self, number: int, delta: CompletionOutput) -> list[Json]:
        parts = self._parts(delta)
        if self.body.include_reasoning is False:
            parts = [part for part in parts if part[0] != "thought"]
        messages = [message for part in parts if (message := self._message(delta.index, *part))]
        details, logprobs = self.details(delta), self._logprobs(delta.logprobs)
        if not messages and (details or logprobs or delta.finish_reason):
            messages = [{}]
        choices = [_piece(delta.index, message) for message in messages]
        if choices:
            choices[0] |= {"logprobs": logprobs} | details
            if delta.finish_reason is not None:
                has_calls = delta.index in self.num_calls
                choices[-1] |= _finish(delta.finish_reason, delta.stop_reason, has_calls)
        return choices

    def choice(self, number: int, one: CompletionOutput, output: RequestOutput) -> Json:
        thoughts, text, parsed = whole_answer(one.text, self.stage, self.format)
        if self.body.parallel_tool_calls is False:
            parsed = parsed[:1]
        calls = [_tool_call(*call) for call in parsed]
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if self.stage is not None:
            is_told = self.body.include_reasoning is not False
            message |= _reasoning((thoughts or None) if is_told else None)
            if thoughts:
                message["content"] = text or None
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        result: Json = {
            "index": one.index,
            "message": message,
            "logprobs": self._logprobs(one.logprobs),
        }
        if self.body.return_token_ids:
            result["token_ids"] = one.token_ids
        return result | _finish(one.finish_reason, one.stop_reason, bool(calls))

    def _parts(self, delta: CompletionOutput) -> list[Part]:
        parser = self.parsers.get(delta.index)
        if parser is None:
            parser = self.parsers[delta.index] = AnswerParser(self.stage, self.format)
        return parser.push(delta.text, is_last=delta.finish_reason is not None)

    def _message(self, index: int, kind: str, text: str) -> Json | None:
        """The delta of a part; None: it is of a call after the only one that is wanted."""
        if kind == "text":
            return {"content": text}
        if kind == "thought":
            return _reasoning(text)
        number = self.num_calls.get(index, 0) - (kind == "arguments")
        self.num_calls[index] = number + 1
        if number and self.body.parallel_tool_calls is False:
            return None
        call = _tool_call(text, "") if kind == "call" else {"function": {"arguments": text}}
        return {"tool_calls": [{"index": number} | call]}

    def _logprobs(self, rows: list[Row] | None) -> Json | None:
        if not self.body.logprobs or not rows:
            return None
        entries = content(rows, self.body.top_logprobs or 0, self.names)
        return {"content": entries, "refusal": None}


def _piece(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _finish(reason: str | None, stop_reason: Any, has_calls: bool) -> Json:
    is_call = has_calls and reason == "stop"
    return {"finish_reason": "tool_calls" if is_call else reason, "stop_reason": stop_reason}


def _reasoning(thoughts: str | None) -> Json:
    return {"reasoning": thoughts, "reasoning_content": thoughts}  # vLLM's name, and its older one


def _tool_call(name: str, arguments: str) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
