"""/v1/completions."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from fastapi import APIRouter, Response

from outdraft.core.errors import RequestError
from outdraft.core.outputs import CompletionOutput, Logprob, RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.server.api.answers import ChoicesAnswer, Json, check_stream_options
from outdraft.server.api.bodies import CompletionRequest
from outdraft.server.api.params import sampling_params
from outdraft.server.api.prompts import encode_prompts, model_name
from outdraft.server.api.reports import CompletionLogprobs, Row, prompt_logprobs, usage
from outdraft.server.api.settings import ApiContext
from outdraft.text.detokenizer import begun_text

DEFAULT_MAX_TOKENS = 16


def add_completions_route(router: APIRouter, context: ApiContext) -> None:
    @router.post("/v1/completions", operation_id="create_completion")
    async def create(body: CompletionRequest) -> Response:
        """Continue a text, or several."""
        model = model_name(context, body.model)
        check_stream_options(body)
        params = _params(body, context)
        prompts = await encode_prompts(context, body, params.max_tokens)
        return CompletionAnswer(context, body, model, prompts, params).reply()


def is_echo_only(body: CompletionRequest) -> bool:
    """True if only the prompt is wanted, for its log-probabilities. The engine makes one token."""
    return bool(body.echo) and body.max_tokens == 0


def _params(body: CompletionRequest, context: ApiContext) -> SamplingParams:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_rows = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        if prompt_rows is not None and prompt_rows != body.logprobs:
            raise RequestError("with echo, prompt_logprobs must be as logprobs", "prompt_logprobs")
        prompt_rows = body.logprobs
    return sampling_params(
        body,
        context,
        max_tokens=1 if is_echo_only(body) else max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_rows,
    )


@dataclass(slots=True)
class CompletionAnswer(ChoicesAnswer[CompletionRequest]):
    """An answer whose choices are texts."""

    prefix = "cmpl-"
    kind = "text_completion"
    chunk_kind = "text_completion"
    opens_at_once = False  # the prompt's log-probabilities may be part of it

    logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)  # by choice

    def usage(self, done: Iterable[RequestOutput]) -> Json:
        result = usage(done)
        if is_echo_only(self.body):  # the one token that was made is no part of the answer
            result |= {"completion_tokens": 0, "total_tokens": result["prompt_tokens"]}
        return result

    def choice(self, number: int, one: CompletionOutput, output: RequestOutput) -> Json:
        first, [rest] = self._prompt_choice(number, one, output), self.pieces(number, one)
        rest.pop("outdraft", None)  # of streams only
        result = first | rest
        result["text"] = first["text"] + rest["text"]
        result["logprobs"] = _joined(first["logprobs"], rest["logprobs"])
        if self.body.prompt_logprobs is not None:
            result["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return result

    def opening(self, number: int, one: CompletionOutput, output: RequestOutput) -> Json | None:
        if not self.body.echo and not self.body.return_token_ids:
            return None
        return self._prompt_choice(number, one, output)

    def pieces(self, number: int, delta: CompletionOutput) -> list[Json]:
        index = self._index(number, delta.index)
        result = _choice(index)
        if delta.finish_reason is not None:
            result |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if is_echo_only(self.body):
            done = {"finish_reason": "length", "stop_reason": None}
            return [result | done] if delta.finish_reason is not None else []
        logprobs, details = self._take(index, delta.logprobs), self.details(delta)
        if not (delta.text or logprobs or delta.finish_reason or details):
            return []
        return [result | {"text": delta.text, "logprobs": logprobs} | details]

    def _index(self, number: int, index: int) -> int:
        return number * (self.body.n or 1) + index

    def _prompt_choice(self, number: int, one: CompletionOutput, output: RequestOutput) -> Json:
        """A choice with nothing of the output yet."""
        result = _choice(self._index(number, one.index))
        if self.body.echo:
            result["text"] = self._prompt_text(number)
            result["logprobs"] = self._prompt_logprobs(number, output)
        if self.body.return_token_ids:
            result["prompt_token_ids"] = output.prompt_token_ids
        return result

    def _prompt_text(self, number: int) -> str:
        prompt = self.prompts[number]
        if prompt.text is not None:
            return prompt.text
        if self.tokenizer is None:
            raise RequestError("echo needs a tokenizer, and the model came without one", "echo")
        token_ids = prompt.token_ids.tolist()
        if is_echo_only(self.body):  # nothing goes on with a character that the prompt only begins
            return self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return begun_text(self.tokenizer, token_ids)

    def _take(self, index: int, rows: list[Row] | None) -> Json | None:
        if self.body.logprobs is None or rows is None:
            return None
        writer = self.logprobs.get(index)
        if writer is None:
            number = index // (self.body.n or 1)
            start = len(self._prompt_text(number)) if self.body.echo else 0
            writer = self.logprobs[index] = CompletionLogprobs(
                self.body.logprobs,
                self.names,
                start,
                prompt_ids=self.prompts[number].token_ids.tolist(),
                skip_special_tokens=self.body.skip_special_tokens is not False,
            )
        return writer.take(rows)

    def _prompt_logprobs(self, number: int, output: RequestOutput) -> Json | None:
        if self.body.logprobs is None or output.prompt_logprobs is None:
            return None
        first_id = output.prompt_token_ids[0]
        token, is_hidden = None, True  # the tokenizer may have put it before the text
        if self.tokenizer is not None:
            token = self.tokenizer.decode([first_id], False)
            is_special = not self.tokenizer.decode([first_id], True)
            is_hidden = is_special and not self._prompt_text(number).startswith(token)
        writer = CompletionLogprobs(self.body.logprobs, self.names, 0, skip_special_tokens=False)
        rows = [row or {first_id: Logprob(0.0, 1, token)} for row in output.prompt_logprobs]
        lists = writer.take(rows, num_hidden=int(is_hidden))
        lists["token_logprobs"][0] = lists["top_logprobs"][0] = None  # nothing precedes it
        return lists


def _choice(index: int) -> Json:
    return {"index": index, "text": "", "logprobs": None, "finish_reason": None}


def _joined(first: Json | None, second: Json | None) -> Json | None:
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}
