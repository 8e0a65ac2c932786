"""/v1/chat/completions."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Response
from tokenizers import Tokenizer

from outdraft.core.errors import RequestError
from outdraft.core.outputs import CompletionOutput, RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.core.structured_outputs import form_of
from outdraft.server.api.answers import ChoicesAnswer, Json, check_stream_options
from outdraft.server.api.bodies import ChatRequest, Tool
from outdraft.server.api.calls import CallArguments, CallName, ParsedCall
from outdraft.server.api.params import check_numbers, sampling_params
from outdraft.server.api.prompts import conversation, encode_chat, model_name, prompt_encoder
from outdraft.server.api.reasoning import (
    AnswerParser,
    Part,
    Stage,
    Thought,
    first_stage,
    whole_answer,
    with_form_after_thoughts,
)
from outdraft.server.api.reports import Row, TokenNames, content, prompt_logprobs
from outdraft.server.api.settings import ApiContext, guarded_router
from outdraft.server.api.tools import (
    CallFormat,
    active_tools,
    call_format,
    call_schema,
    hides_calls,
)


def chat_router(context: ApiContext) -> APIRouter:
    router = guarded_router(context)

    @router.post("/v1/chat/completions", operation_id="create_chat_completion")
    async def create(body: ChatRequest) -> Response:
        """Continue a conversation."""
        model = model_name(context, body.model)
        check_stream_options(body)
        check_numbers(body, context.settings)
        params = sampling_params(
            body,
            context.settings,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=_num_logprobs(body),
        )
        tools = active_tools(body)
        template = context.chat_template
        takes_several = template is not None and template.takes_several_calls
        calls = call_format(body, tools, context.settings, template_takes_several=takes_several)
        params = _with_calls(params, tools or (), calls, context.inputs.tokenizer)
        encode = prompt_encoder(context, body, params.max_tokens, adds_special_tokens=False)
        prompt = await encode_chat(context, conversation(body, tools), encode)
        continued = body.messages[-1] if body.continue_final_message else None
        stage = first_stage(context.settings, prompt, continued)
        params = with_form_after_thoughts(params, stage)
        return ChatAnswer(context, body, model, [prompt], params, stage, calls).reply()

    return router


def _with_calls(
    params: SamplingParams, tools: Sequence[Tool], calls: CallFormat | None, texts: Tokenizer | None
) -> SamplingParams:
    """The parameters, so that the output has such calls, and its text has them too."""
    if hides_calls(calls, texts):
        params = replace(params, skip_special_tokens=False)
    if calls is not None and calls.may_be_several:
        schema = call_schema(tools, calls.names, may_be_several=True)
        params = replace(params, structured=form_of("tool_choice", "json_schema", schema))
    return params


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


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

    def choices(self, number: int, output: RequestOutput) -> list[Json]:
        return [self._choice(one) for one in output.outputs]

    def opening(self, number: int, output: RequestOutput) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": one.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for one in output.outputs
        ]

    def pieces(self, number: int, delta: CompletionOutput) -> list[Json]:
        parts = self._parts(delta)
        if self.body.include_reasoning is False:
            parts = [part for part in parts if not isinstance(part, Thought)]
        messages = [message for part in parts if (message := self._message(delta.index, part))]
        details, logprobs = self.details(delta), self._logprobs(delta.logprobs)
        if not messages and (details or logprobs or delta.finish_reason):
            messages = [{}]
        choices: list[Json] = [
            {"index": delta.index, "delta": message, "logprobs": None, "finish_reason": None}
            for message in messages
        ]
        if choices:
            choices[0] |= {"logprobs": logprobs} | details
            if delta.finish_reason is not None:
                has_calls = delta.index in self.num_calls
                choices[-1] |= _finish(delta.finish_reason, delta.stop_reason, has_calls)
        return choices

    def _choice(self, one: CompletionOutput) -> Json:
        thoughts, text, parsed = whole_answer(one.text, self.stage, self.format)
        if self.body.parallel_tool_calls is False:
            parsed = parsed[:1]
        calls = [_tool_call(call) for call in parsed]
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

    def _message(self, index: int, part: Part) -> Json | None:
        """The delta of a part; None: it is of a call after the only one that is wanted."""
        if isinstance(part, str):
            return {"content": part}
        if isinstance(part, Thought):
            return _reasoning(part.text)
        number = self.num_calls.get(index, 0) - isinstance(part, CallArguments)
        self.num_calls[index] = number + 1
        if number and self.body.parallel_tool_calls is False:
            return None
        call: Json = {"function": {"arguments": part.text}}
        if isinstance(part, CallName):
            call = _tool_call(ParsedCall(part.text, ""))
        return {"tool_calls": [{"index": number} | call]}

    def _logprobs(self, rows: list[Row] | None) -> Json | None:
        if not self.body.logprobs or not rows:
            return None
        names = TokenNames(self.tokenizer, bool(self.body.return_tokens_as_token_ids))
        entries = content(rows, self.body.top_logprobs or 0, names)
        return {"content": entries, "refusal": None}


def _finish(reason: str | None, stop_reason: Any, has_calls: bool) -> Json:
    is_call = has_calls and reason == "stop"
    return {"finish_reason": "tool_calls" if is_call else reason, "stop_reason": stop_reason}


def _reasoning(thoughts: str | None) -> Json:
    return {"reasoning": thoughts, "reasoning_content": thoughts}  # vLLM's name, and its older one


def _tool_call(call: ParsedCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
