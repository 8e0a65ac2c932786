"""An EngineClient that writes what a script says, with a real tokenizer and a real detokenizer."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from tokenizers import Tokenizer

from outdraft.core.errors import EngineDeadError
from outdraft.core.outputs import (
    CompletionOutput,
    DraftTrace,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
    TokenOrigin,
)
from outdraft.core.sampling import SamplingParams
from outdraft.engine.detokenizer import Detokenizer
from outdraft.engine.inputs import InputProcessor
from outdraft.engine.prompts import EncodedPrompt
from outdraft.server.client import TextDelta, Update
from outdraft.server.messages import EngineInfo, Steps
from tests.engine.byte_level import tokenizer

MAX_MODEL_LEN = 4096
TEXT = "the cat sat on the mat, héllo 日本 stop here"


def default_script(prompt: str, index: int) -> str:
    """Different for every choice, the same every time."""
    return f"{TEXT} {index}"


def fake_inputs(texts: Tokenizer | None = None) -> InputProcessor:
    return InputProcessor(
        texts or tokenizer(),
        vocab_size=tokenizer().get_vocab_size(),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[1],
        seed=0,
    )


@dataclass
class FakeEngine:
    """Every step accepts the first of two drafted tokens, so two tokens a step.

    Attributes:
        fail_at: the update, from 0, in whose place `error` is raised.
        stall_at: the update before which it waits for ever.
        lossless: what it says of its own outputs.
        drafters: who drafts the first and the second token of a step.
        aborted: ids of requests whose reader left before they ended.
    """

    inputs: InputProcessor = field(default_factory=fake_inputs)
    script: Callable[[str, int], str] = default_script
    error: Exception | None = None
    fail_at: int = 0
    stall_at: int | None = None
    is_alive: bool = True
    ended_by: str | None = None
    lossless: bool = True
    drafters: tuple[str, str] = ("prediction", "prediction")
    requests: list[tuple[EncodedPrompt, SamplingParams, int]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_running: int = 0

    @property
    def info(self) -> EngineInfo:
        raise NotImplementedError

    @property
    def num_unfinished(self) -> int:
        return self.num_running

    def watch(self, on_steps: Callable[[Steps], None]) -> None:
        raise NotImplementedError

    async def generate(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, priority: int = 0
    ) -> AsyncIterator[Update]:
        if not self.is_alive:
            raise EngineDeadError("the engine process has died", self.ended_by)
        self.inputs.check_params(params)
        self.requests.append((prompt, params, priority))
        self.started.append(request_id)
        self.num_running += 1
        text = tokenizer().decode(prompt.token_ids.tolist(), skip_special_tokens=False)
        output = _new_output(request_id, prompt, params)
        output.metrics.speculative_decoding.lossless = self.lossless
        writers = [
            _Writer(self.script(text, index), output, index, params, self.drafters)
            for index in range(params.n)
        ]
        number = 0
        try:
            while not output.finished:
                if self.error is not None and number == self.fail_at:
                    raise self.error
                if number == self.stall_at:
                    await asyncio.Event().wait()
                deltas = [writer.step() for writer in writers if writer.is_running]
                output.finished = not any(writer.is_running for writer in writers)
                number += 1
                yield Update(output, deltas)
                await asyncio.sleep(0)
        finally:
            self.num_running -= 1
            if not output.finished:
                self.aborted.append(request_id)


def _new_output(request_id: str, prompt: EncodedPrompt, params: SamplingParams) -> RequestOutput:
    ids = prompt.token_ids.tolist()
    rows = None
    if params.prompt_logprobs is not None:
        rows = [None, *(_row(i, k, params.prompt_logprobs) for k, i in enumerate(ids[1:]))]
    return RequestOutput(
        request_id,
        prompt.text,
        ids,
        [CompletionOutput(index) for index in range(params.n)],
        finished=False,
        metrics=RequestMetrics(time.monotonic(), SpeculationMetrics(2)),
        prompt_logprobs=rows,
        num_cached_tokens=len(ids) // 2,
    )


def _row(token_id: int, position: int, num_top: int) -> dict[int, Logprob]:
    """The chosen token is the second most likely one."""
    names = tokenizer()

    def entry(i: int, rank: int) -> Logprob:
        return Logprob(-rank - position / 128, rank, names.decode([i], False))

    others = [i for i in range(10, 40) if i != token_id]
    row = {token_id: entry(token_id, 2)}
    ranks = [rank for rank in range(1, num_top + 1) if rank != 2]
    return row | {i: entry(i, rank) for i, rank in zip(others, ranks, strict=False)}


class _Writer:
    """One choice."""

    def __init__(
        self,
        text: str,
        output: RequestOutput,
        index: int,
        params: SamplingParams,
        drafters: tuple[str, str],
    ) -> None:
        self._ids = tokenizer().encode(text).ids
        self._params = params
        self._drafters = drafters
        self._metrics = output.metrics.speculative_decoding
        self._one = output.outputs[index]
        self._detokenizer = Detokenizer(
            tokenizer(),
            params.stop_strings,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_string=params.include_stop_str_in_output,
        )

    @property
    def is_running(self) -> bool:
        return self._one.finish_reason is None

    def step(self) -> TextDelta:
        one, params = self._one, self._params
        told = len(one.text)
        new: list[int] = []
        for _ in range(2):
            if not self.is_running:
                break
            token_id = self._ids[len(one.token_ids)]
            new.append(token_id)
            one.token_ids.append(token_id)
            stop = self._detokenizer.push(token_id)
            if stop is not None:
                one.finish_reason, one.stop_reason = "stop", stop
            elif len(one.token_ids) == len(self._ids):
                one.finish_reason = "stop"
            elif len(one.token_ids) == params.max_tokens:
                one.finish_reason = "length"
        origins = [TokenOrigin(self._drafters[0]), TokenOrigin.RECOVERED][: len(new)]
        one.origins += origins
        self._metrics.record(Counter(self._drafters), {self._drafters[0]: 1})
        rows = None
        if params.logprobs is not None:
            first = len(one.token_ids) - len(new)
            rows = [_row(i, first + k, params.logprobs) for k, i in enumerate(new)]
            one.logprobs = (one.logprobs or []) + rows
        one.text = self._detokenizer.settled_text
        if not self.is_running:
            self._detokenizer.finish(at_stop_string=one.stop_reason is not None)
            one.text = self._detokenizer.text
        steps = None
        if params.speculation.trace:
            steps = [DraftTrace(self._drafters, (new[0], 20), (), (0,), len(new), 0.25)]
        return TextDelta(
            one.index,
            one.text[told:],
            new,
            origins,
            rows,
            one.finish_reason,
            one.stop_reason,
            steps,
        )


def with_script(text: str) -> FakeEngine:
    """An engine all of whose answers are the same."""
    return replace(FakeEngine(), script=lambda _prompt, _index: text)
