"""One request, its text shown while it grows."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import chain

from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import Assembler, checked
from outdraft.engine.engine import Engine


def stream(
    engine: Engine,
    request_id: str,
    prompt: str | Sequence[int],
    params: SamplingParams,
    show: Callable[[str], None],
) -> RequestOutput:
    """Run one request to its end and give each new piece of its text to `show`.

    An exception, Ctrl-C included, aborts the request.

    Raises:
        RequestError: it can never run.
        GenerationError: it failed while it ran.
    """
    output: RequestOutput | None = None
    shown = 0
    with closing(Assembler(engine).run([(request_id, prompt, params, 0)])) as steps:
        for output in chain.from_iterable(steps):
            text = output.outputs[0].text
            if len(text) > shown:
                show(text[shown:])
                shown = len(text)
    return checked(output)


def summary(output: RequestOutput, started_s: float) -> str:
    """One line about a finished request; `started_s` is of `time.perf_counter`."""
    num_tokens = len(output.outputs[0].token_ids)
    elapsed_s = time.perf_counter() - started_s
    speculation = output.metrics.speculative_decoding
    parts = [f"{num_tokens} tokens in {elapsed_s:.2f} s ({num_tokens / elapsed_s:.1f} tokens/s)"]
    if speculation.num_spec_steps:
        parts.append(f"acceptance rate {speculation.draft_acceptance_rate:.0%}")
        parts.append(f"acceptance length {speculation.mean_acceptance_length:.2f}")
    return ", ".join(parts)
