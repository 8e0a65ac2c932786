"""An EngineClient that writes what a script says; texts are assembled as they are in a server."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field, replace

from tokenizers import Tokenizer

from outdraft.core.errors import EngineDeadError
from outdraft.core.outputs import (
    CompletionOutput,
    DraftTrace,
    RequestDelta,
    SequenceDelta,
    TargetChoice,
)
from outdraft.core.plan import TokenLogprobs
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import RequestAssembly
from outdraft.engine.inputs import EncodedPrompt, InputProcessor
from outdraft.server.client import Update
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
        fail_at: the update in whose place `error` is raised; number 0 says that it was accepted.
        stall_at: the update before which it waits for ever.
        lossless: what it says of its own outputs.
        sources: who drafted the first and the second token of a step.
        likely: tokens that are likely everywhere, the first one more than the text's own.
        aborted: ids of requests whose reader left before they ended.
    """

    inputs: InputProcessor = field(default_factory=fake_inputs)
    script: Callable[[str, int], str | list[int]] = default_script
    error: Exception | None = None
    fail_at: int = 0
    stall_at: int | None = None
    is_alive: bool = True
    ended_by: str | None = None
    lossless: bool = True
    sources: tuple[str, str] = ("prediction", "prediction")
    likely: Iterable[int] = range(10, 40)
    requests: list[tuple[EncodedPrompt, SamplingParams, int]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_running: int = 0
    profiled: str | None = None  # where its trace will be written

    @property
    def num_unfinished(self) -> int:
        return self.num_running

    async def profile(self, path: str | None) -> str | None:
        if (path is None) == (self.profiled is None):
            return "not now"
        self.profiled = path
        return None

    async def generate(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, priority: int = 0
    ) -> AsyncGenerator[Update]:
        if not self.is_alive:
            raise EngineDeadError("the engine process has died", self.ended_by)
        self.inputs.check_params(params)
        self.requests.append((prompt, params, priority))
        self.started.append(request_id)
        self.num_running += 1
        text = tokenizer().decode(prompt.token_ids.tolist(), skip_special_tokens=False)
        assembly = RequestAssembly(request_id, prompt, params, self.inputs)
        output = assembly.output
        writers = [
            _Writer(self.script(text, index), index, params, self.sources, self.likely)
            for index in range(params.n)
        ]
        number = 0
        try:
            while not output.finished:
                if self.error is not None and number == self.fail_at:
                    raise self.error
                if number == self.stall_at:
                    await asyncio.Event().wait()
                gained: list[CompletionOutput] = []
                if number > 0:
                    gained, _ = assembly.add(self._delta(request_id, prompt, params, writers))
                number += 1
                yield Update(output, gained)
                await asyncio.sleep(0)
        finally:
            self.num_running -= 1
            if not output.finished:
                self.aborted.append(request_id)

    def _delta(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        writers: list["_Writer"],
    ) -> RequestDelta:
        """What a step brings."""
        prompt_rows = None
        if params.prompt_logprobs is not None and not writers[0].num_written:
            behind_first = prompt.token_ids.tolist()[1:]
            prompt_rows = tuple(_row(i, place, self.likely) for place, i in enumerate(behind_first))
        return RequestDelta(
            request_id,
            tuple(writer.step() for writer in writers if writer.is_running),
            first_scheduled_s=0.0,
            num_cached_tokens=len(prompt.token_ids) // 2,
            num_preemptions=0,
            num_spec_tokens=2,
            lossless=self.lossless,
            prompt_logprobs=prompt_rows,
        )


def _row(token_id: int, position: int, likely_ids: Iterable[int]) -> TokenLogprobs:
    """The chosen token is the second most likely one."""
    likely, *others = [i for i in likely_ids if i != token_id]
    ids = (likely, token_id, *others)
    values = tuple(-rank - position / 128 for rank in range(1, len(ids) + 1))
    return TokenLogprobs(token_id, values[1], 2, ids, values)


class _Writer:
    """One choice. It goes on behind a stop string, as an engine does that has not heard of it."""

    def __init__(
        self,
        text: str | list[int],
        index: int,
        params: SamplingParams,
        sources: tuple[str, str],
        likely: Iterable[int],
    ) -> None:
        self._index = index
        self._ids = tokenizer().encode(text).ids if isinstance(text, str) else text
        self._last = min(len(self._ids), params.max_tokens or len(self._ids))
        self._params = params
        self._sources = sources
        self._likely = likely
        self.num_written = 0

    @property
    def is_running(self) -> bool:
        return self.num_written < self._last

    def step(self) -> SequenceDelta:
        first = self.num_written
        new = tuple(self._ids[first : min(first + 2, self._last)])
        self.num_written += len(new)
        rows, trace, reason = (), None, None
        if self._params.logprobs is not None:
            rows = tuple(_row(i, first + k, self._likely) for k, i in enumerate(new))
        if self._params.speculation.trace:
            trace = DraftTrace(self._sources, (new[0], 20), (0, 1), (0,), len(new), 0.25)
        if not self.is_running:
            reason = "stop" if self.num_written == len(self._ids) else "length"
        origins = (self._sources[0], TargetChoice.RECOVERED)[: len(new)]
        drafted = dict(Counter(self._sources))
        return SequenceDelta(self._index, new, origins, drafted, rows, trace, reason)


def with_script(text: str) -> FakeEngine:
    """An engine all of whose answers are the same."""
    return replace(FakeEngine(), script=lambda _prompt, _index: text)
