"""Traces for replays: of a real engine, or made up."""

from collections.abc import Sequence
from pathlib import Path

from outdraft.core.draft import DraftSource
from outdraft.core.recorded import RecordedOutput, RecordedRequest, RecordedStep, read_requests
from outdraft.core.request import FinishReason
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import RequestAssembly
from outdraft.engine.llm import LLM
from outdraft.server.trace_file import TraceFile


def record(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    path: Path,
    *,
    concurrency: int = 1,
    aborted_at: dict[int, int] | None = None,
) -> list[RecordedRequest]:
    """Run an engine as a server does, `concurrency` requests at once, and read what it recorded.

    aborted_at: by number of the request: it is aborted when it has so many tokens, or more.
    """
    engine, queue = llm.engine, list(enumerate(zip(prompts, params, strict=True)))
    live: dict[str, tuple[RequestAssembly, SamplingParams]] = {}
    with TraceFile(path, llm.config.speculation) as trace:

        def end(request_id: str) -> None:
            assembly, own = live.pop(request_id)
            trace.record(assembly, own, engine.inputs.max_model_len, FinishReason.ABORT)

        while queue or live:
            while queue and len(live) < concurrency:
                number, (prompt, own) = queue.pop(0)
                encoded = engine.inputs.encoded(prompt)
                engine.add_request(str(number), encoded, own)
                assembly = RequestAssembly(
                    str(number), encoded, own, engine.inputs, keeps_steps=True
                )
                live[str(number)] = assembly, own
            for delta in engine.step():
                assembly, _ = live[delta.request_id]
                _, stopped = assembly.add(delta)
                for completion in stopped:
                    engine.stop_sequence(delta.request_id, 0, len(completion.token_ids))
                most = (aborted_at or {}).get(int(delta.request_id))
                if assembly.output.finished:
                    end(delta.request_id)
                elif most is not None and len(assembly.output.outputs[0].token_ids) >= most:
                    engine.abort(delta.request_id)
                    end(delta.request_id)
    requests, is_whole = read_requests(path)
    assert is_whole
    return requests


def made_up(
    token_ids: list[int],
    steps: list[RecordedStep],
    *,
    arrival_s: float = 0.0,
    finish_reason: str = "stop",
    tree: Sequence[int] = (),
    **changes: object,
) -> RecordedRequest:
    """A request with a prompt of four tokens."""
    return RecordedRequest(
        format=1,
        arrival_s=arrival_s,
        elapsed_s=1.0,
        prompt_token_ids=[1, 2, 3, 4],
        max_tokens=4096,
        temperature=1.0,
        rule="block",
        outputs=[RecordedOutput(token_ids, finish_reason, steps)],
        tree=list(tree),
        **changes,
    )


def drafted_by_network(
    rng, num_tokens: int, length: int, chance: float, source: DraftSource = DraftSource.MODEL
) -> RecordedRequest:
    """A text whose drafts of a network were accepted with the same chance at every level."""
    steps, count = [RecordedStep(1)], 1
    while count < num_tokens:
        drafted = min(length, num_tokens - count - 1)
        accepted = 0
        while accepted < drafted and rng.random() < chance:
            accepted += 1
        drafts = {str(source): drafted} if drafted else {}
        steps.append(RecordedStep(1 + accepted, drafts, dict.fromkeys(drafts, accepted)))
        count += 1 + accepted
    return made_up(rng.integers(5, 60_000, count).tolist(), steps)
