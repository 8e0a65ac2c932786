"""What answers say about themselves: usage, speculation metrics, the trace of every token."""

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

from outdraft.core.outputs import (
    CompletionOutput,
    DraftTrace,
    RequestOutput,
    SpeculationMetrics,
    TokenOrigin,
)
from outdraft.server.api.logprobs import finite


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Counts of tokens, over all prompts and choices."""
    all_outputs = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in all_outputs)
    completion = sum(len(one.token_ids) for output in all_outputs for one in output.outputs)
    accepted, rejected = _prediction_tokens(all_outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in all_outputs)
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


def _prediction_tokens(outputs: Iterable[RequestOutput]) -> tuple[int, int]:
    """Tokens of the client's prediction that were accepted, and that were drafted in vain."""
    drafted = accepted = 0
    for output in outputs:
        metrics = output.metrics.speculative_decoding
        drafted += metrics.drafted_by_source.get(TokenOrigin.PREDICTION, 0)
        accepted += metrics.accepted_by_source.get(TokenOrigin.PREDICTION, 0)
    return accepted, drafted - accepted


def metrics(output: RequestOutput) -> dict[str, Any]:
    """How speculation fared for a request, all its choices together."""
    return {"speculative_decoding": _speculation(output.metrics.speculative_decoding)}


def _speculation(metrics: SpeculationMetrics) -> dict[str, Any]:
    by_length = metrics.acceptance_histogram_by_draft_length
    return {
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "draft_acceptance_rate": metrics.draft_acceptance_rate,
        "acceptance_histogram": metrics.acceptance_histogram,
        "acceptance_histogram_by_draft_length": {str(k): v for k, v in by_length.items()},
        "num_spec_steps": metrics.num_spec_steps,
        "num_accepted_draft_tokens": metrics.num_accepted_draft_tokens,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_spec_tokens": metrics.num_spec_tokens,
        "lossless": metrics.lossless,
        "per_step_accepted": metrics.per_step_accepted,
        "per_step_drafted": metrics.per_step_drafted,
        "drafted_by_source": metrics.drafted_by_source,
        "accepted_by_source": metrics.accepted_by_source,
    }


def trace(delta: CompletionOutput, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """Every new token with how it came, and what was drafted; None if nobody asked."""
    if delta.trace is None:
        return None
    pairs = zip(delta.token_ids, delta.origins, strict=True)
    return {
        "tokens": [_token(token_id, tokenizer) | {"origin": str(o)} for token_id, o in pairs],
        "steps": [_step(step, tokenizer) for step in delta.trace],
    }


def _step(step: DraftTrace, tokenizer: Tokenizer | None) -> dict[str, Any]:
    drafted = [
        _token(one, tokenizer) | {"source": source}
        for one, source in zip(step.drafted_ids, step.sources, strict=True)
    ]
    for token, logprob in zip(drafted, step.drafted_logprobs, strict=False):  # or there are none
        token["logprob"] = finite(logprob)
    return {
        "source": step.sources[0] if step.sources else None,  # who drafted first
        "drafted": drafted,
        "parents": step.parents,
        "accepted_rows": step.accepted_rows,
        "num_emitted": step.num_emitted,
        "seconds": step.seconds,
    }


def _token(token_id: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = tokenizer.decode([token_id], False) if tokenizer is not None else ""
    return {"id": token_id, "text": text}
