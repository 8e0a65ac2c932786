"""Parts of answers beside their text: log-probabilities, usage, speculation's numbers, traces."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from tokenizers import Tokenizer

from outdraft.core.draft import DraftSource
from outdraft.core.outputs import (
    CompletionOutput,
    DraftTrace,
    Logprob,
    RequestOutput,
)
from outdraft.text.detokenizer import REPLACEMENT, Detokenizer, token_bytes

LOWEST = -9999.0  # JSON has no minus infinity
Row = dict[int, Logprob]  # the chosen token first


@dataclass(frozen=True, slots=True)
class TokenNames:
    """Names of tokens in log-probabilities: their text, or their bytes if these are no characters.

    Parts of characters all decode to the same replacement, which would be no name.
    """

    tokenizer: Tokenizer | None
    as_ids: bool = False  # by their numbers, all of them

    def name(self, token_id: int, decoded: str | None) -> str:
        """`decoded`: what the tokenizer makes of the token; None: there is no tokenizer."""
        if self.as_ids or decoded is None:
            return _number(token_id)
        spelled = self.spelled(token_id, decoded)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def spelled(self, token_id: int, decoded: str) -> bytes:
        """The bytes that the token stands for."""
        if REPLACEMENT not in decoded or self.tokenizer is None:
            return decoded.encode()
        return token_bytes(self.tokenizer, token_id)


def _number(token_id: int) -> str:
    return f"token_id:{token_id}"


def content(rows: Sequence[Row], num_top: int, names: TokenNames) -> list[dict[str, Any]]:
    """One entry a token; also what /v1/responses sends."""
    entries: list[dict[str, Any]] = []
    for row in rows:
        chosen = next(iter(row))
        top = [_entry(token_id, row[token_id], names) for token_id in _top(row, num_top)]
        entries.append(_entry(chosen, row[chosen], names) | {"top_logprobs": top})
    return entries


def prompt_logprobs(
    rows: Sequence[Row | None] | None,
) -> list[dict[str, dict[str, Any]] | None] | None:
    """vLLM's shape: per prompt token, token id -> Logprob."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            str(token_id): asdict(entry) | {"logprob": finite(entry.logprob)}
            for token_id, entry in row.items()
        }
        for row in rows
    ]


class CompletionLogprobs:
    """For /v1/completions: parallel lists, with an offset into the choice's text.

    Tokens that make one character together have its offset. A token that the text leaves out has
    the offset of what follows it. Where several tokens of a row have the same name, it is that of
    the chosen one, or of the most likely; the others go by their numbers.
    """

    def __init__(self, num_top: int, names: TokenNames, start: int, **options: Any) -> None:
        """
        Args:
            num_top: most likely tokens in the lists; the chosen one is always there.
            start: of the tokens' text in the choice's.
            options: of the Detokenizer.
        """
        self._num_top, self._names, self._start = num_top, names, start
        tokenizer = names.tokenizer
        self._text = Detokenizer(tokenizer, (), **options) if tokenizer is not None else None

    def take(self, rows: Sequence[Row], num_hidden: int = 0) -> dict[str, Any]:
        """The lists of the next tokens. `num_hidden`: the first of them that the text lacks."""
        result: dict[str, Any] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for number, row in enumerate(rows):
            chosen = next(iter(row))
            shown = dict.fromkeys([*_top(row, self._num_top), chosen])
            called = self._distinct_names(row, chosen, shown)
            is_in_text = number >= num_hidden
            result["text_offset"].append(self._advance(chosen) if is_in_text else self._start)
            result["tokens"].append(called[chosen])
            result["token_logprobs"].append(finite(row[chosen].logprob))
            result["top_logprobs"].append({called[i]: finite(row[i].logprob) for i in shown})
        return result

    def _distinct_names(self, row: Row, chosen: int, shown: Iterable[int]) -> dict[int, str]:
        found: dict[str, int] = {}
        for token_id in [chosen, *shown]:
            name = self._names.name(token_id, row[token_id].decoded_token)
            if found.setdefault(name, token_id) != token_id:
                found[_number(token_id)] = token_id
        return {token_id: name for name, token_id in found.items()}

    def _advance(self, token_id: int) -> int:
        """Append the next token of the text; the offset where it begins."""
        if self._text is None:
            return self._start
        offset = self._start + len(self._text.text)
        self._text.push(token_id)
        return offset


def _top(row: Row, num_top: int) -> list[int]:
    return sorted((i for i in row if row[i].rank <= num_top), key=lambda i: row[i].rank)[:num_top]


def _entry(token_id: int, entry: Logprob, names: TokenNames) -> dict[str, Any]:
    decoded = entry.decoded_token
    return {
        "token": names.name(token_id, decoded),
        "logprob": finite(entry.logprob),
        "bytes": None if decoded is None else list(names.spelled(token_id, decoded)),
    }


def finite(logprob: float) -> float:
    """JSON has no infinity: the least value that is sent, as vLLM does."""
    return max(logprob, LOWEST)


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Counts of tokens, over all prompts and choices."""
    all_outputs = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in all_outputs)
    completion = sum(len(one.token_ids) for output in all_outputs for one in output.outputs)
    found = [output.metrics.speculative_decoding for output in all_outputs]
    predicted = DraftSource.PREDICTION
    accepted = sum(metrics.accepted_by_source.get(predicted, 0) for metrics in found)
    drafted = sum(metrics.drafted_by_source.get(predicted, 0) for metrics in found)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in all_outputs)
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def metrics(output: RequestOutput) -> dict[str, Any]:
    """Numbers about a request's speculation, over all its choices; with a trace, its summary."""
    found = output.metrics.speculative_decoding
    numbers = {name: getattr(found, name) for name in _SPECULATION}
    steps = [step for one in output.outputs for step in one.trace or ()]
    if steps:
        numbers |= {"acceptance_by_level": _by_level(steps), "decisions": _by_reason(steps)}
    return {"speculative_decoding": numbers}


_SPECULATION = (
    *("mean_acceptance_length", "draft_acceptance_rate"),
    *("acceptance_histogram", "acceptance_histogram_by_draft_length"),
    *("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens"),
    *("lossless", "per_step_accepted", "per_step_drafted"),
    *("drafted_by_source", "accepted_by_source"),
)


def trace(delta: CompletionOutput, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """Every new token with its origin, and all drafts; None if the request asked for none."""
    if delta.trace is None:
        return None
    pairs = zip(delta.token_ids, delta.origins, strict=True)
    return {
        "tokens": [_token(token_id, tokenizer) | {"origin": str(o)} for token_id, o in pairs],
        "steps": [_step(step, tokenizer) for step in delta.trace],
    }


def _by_level(steps: Sequence[DraftTrace]) -> list[dict[str, int]]:
    """Numbers of drafts that reached each level, from the first on, and were accepted there.

    A draft reaches the level after its last accepted token if it goes on there. Tokens after the
    end of the text do not count.
    """
    reached: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for step in steps:
        rows = step.accepted_rows
        num_accepted = min(len(rows), step.num_emitted)
        last = rows[-1] + 1 if rows else 0  # its place among the parents; the root's is 0
        goes_on = step.num_emitted > len(rows) and last in step.parents
        accepted.update(range(num_accepted))
        reached.update(range(num_accepted + goes_on))
    return [
        {"level": level + 1, "reached": reached[level], "accepted": accepted[level]}
        for level in range(len(reached))
    ]


def _by_reason(steps: Sequence[DraftTrace]) -> dict[str, dict[str, float]]:
    """Steps by the reason of their decision, with the mean of each number that decisions had."""
    by_reason: dict[str, list[dict[str, Any]]] = {}
    for step in steps:
        if step.decision is not None:
            by_reason.setdefault(step.decision.reason, []).append(_decision(step))
    return {
        reason: {"steps": len(those)}
        | {
            name: fmean(values)
            for name in ("predicted_gain", "price")
            if (values := [one[name] for one in those if name in one])
        }
        for reason, those in by_reason.items()
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
        **_decision(step),
    }


def _decision(step: DraftTrace) -> dict[str, Any]:
    """Why the step drafted as it did, and what was expected of it; nothing if that is not known."""
    if step.decision is None:
        return {}
    result: dict[str, Any] = {"reason": step.decision.reason, "granted": step.granted}
    if step.decision.price is not None:
        result["price"] = step.decision.price
    if step.decision.is_predicted:
        result["predicted_seconds"] = step.decision.step_s
        result["predicted_gain"] = step.decision.gain
    return result


def _token(token_id: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = tokenizer.decode([token_id], False) if tokenizer is not None else ""
    return {"id": token_id, "text": text}
