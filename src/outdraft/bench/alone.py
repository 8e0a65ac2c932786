"""One request by itself in an engine of this process, with the time of its steps."""

from collections.abc import Callable

from outdraft.core.errors import GenerationError
from outdraft.core.jit import working_seconds
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembler import Assembler
from outdraft.engine.engine import Engine


def complete_alone(
    engine: Engine,
    request_id: str,
    prompt: str,
    params: SamplingParams,
    shown: Callable[[RequestOutput], None],
) -> tuple[RequestOutput, int, float]:
    """The finished output, its tokens behind the first ones, and the time they took in steps.

    Raises:
        GenerationError: it failed while it ran.
    """
    assembler = Assembler(engine)
    assembler.add_request(request_id, prompt, params)
    output: RequestOutput | None = None
    num_first, decode_s = 0, 0.0
    while engine.has_work:
        started_s = working_seconds()
        outputs = assembler.step()
        step_s = working_seconds() - started_s
        for changed in outputs:
            if output is None:
                num_first = len(changed.outputs[0].token_ids)
            else:
                decode_s += step_s
            output = changed
            shown(changed)
    assert output is not None
    if output.error is not None:
        raise GenerationError(output.error)
    return output, len(output.outputs[0].token_ids) - num_first, decode_s
