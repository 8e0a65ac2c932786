"""What a request's assembly leaves for a trace of requests."""

from outdraft.config.speculation import SpeculationConfig
from outdraft.core.outputs import CompletionOutput, StepCounts
from outdraft.core.recorded import RecordedOutput, RecordedRequest, RecordedStep
from outdraft.core.request import FinishReason
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.host_sources import verification_rule
from outdraft.engine.assembly import RequestAssembly


def recorded_request(
    assembly: RequestAssembly,
    params: SamplingParams,
    config: SpeculationConfig,
    *,
    started_s: float,
    ended_s: float,
    max_model_len: int,
    unfinished: FinishReason = FinishReason.ABORT,
) -> RecordedRequest:
    """The line of a request that has ended, or is given up now.

    Args:
        assembly: one that keeps steps.
        params: its prediction is none, or ids.
        config: the engine's.
        started_s, ended_s: when the recording began, and now; of the monotonic clock.
        unfinished: why sequences without an end have none.
    """
    output = assembly.output
    prompt_ids, arrival_s = output.prompt_token_ids, output.metrics.arrival_s
    room = max_model_len - len(prompt_ids)
    network = config.network
    prediction = params.prediction
    assert not isinstance(prediction, str)
    return RecordedRequest(
        format=1,
        arrival_s=round(max(0.0, arrival_s - started_s), 6),
        elapsed_s=round(ended_s - arrival_s, 6),
        prompt_token_ids=prompt_ids,
        max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
        temperature=float(params.temperature),
        rule=verification_rule(config, params),
        outputs=[
            _recorded_output(completion, steps, unfinished)
            for completion, steps in zip(output.outputs, assembly.steps, strict=True)
        ],
        num_cached_tokens=output.num_cached_tokens,
        may_draft=params.speculation.enabled,
        method=params.speculation.method,
        num_speculative_tokens=params.speculation.num_speculative_tokens,
        prediction_token_ids=list(prediction or ()),
        tree=list(network.tree.levels) if network is not None and network.tree is not None else [],
    )


def _recorded_output(
    completion: CompletionOutput, steps: list[StepCounts], unfinished: FinishReason
) -> RecordedOutput:
    return RecordedOutput(
        list(completion.token_ids),
        completion.finish_reason or str(unfinished),  # pyright: ignore[reportArgumentType]
        [RecordedStep(one.num_tokens, dict(one.drafted), dict(one.accepted)) for one in steps],
    )
