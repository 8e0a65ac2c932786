"""Log-probabilities in the shapes of the two OpenAI routes, and of vLLM for prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outdraft.core.outputs import Logprob

LOWEST = -9999.0  # JSON has no minus infinity
Row = dict[int, Logprob]  # the chosen token first


def chat_logprobs(rows: Sequence[Row], num_top: int, *, as_ids: bool) -> dict[str, Any]:
    """For /v1/chat/completions."""
    return {"content": content(rows, num_top, as_ids=as_ids), "refusal": None}


def content(rows: Sequence[Row], num_top: int, *, as_ids: bool = False) -> list[dict[str, Any]]:
    """One entry a token; also what /v1/responses sends."""
    entries: list[dict[str, Any]] = []
    for row in rows:
        chosen = next(iter(row))
        top = [_entry(token_id, row[token_id], as_ids) for token_id in _top(row, num_top)]
        entries.append(_entry(chosen, row[chosen], as_ids) | {"top_logprobs": top})
    return entries


def prompt_logprobs(
    rows: Sequence[Row | None] | None,
) -> list[dict[str, dict[str, Any]] | None] | None:
    """vLLM's shape: per prompt token, token id -> Logprob."""
    if rows is None:
        return None
    return [_prompt_row(row) if row is not None else None for row in rows]


def _prompt_row(row: Row) -> dict[str, dict[str, Any]]:
    return {
        str(token_id): {
            "logprob": finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token_id, entry in row.items()
    }


@dataclass(slots=True)
class CompletionLogprobs:
    """For /v1/completions: parallel lists, with a running offset into the choice's text.

    Attributes:
        num_top: most likely tokens to tell; the chosen one is always told.
        offset: characters of the tokens so far.
    """

    num_top: int
    as_ids: bool
    offset: int = field(default=0, init=False)

    def take(self, rows: Sequence[Row | None], first_token: str = "") -> dict[str, Any]:
        """The lists of the next tokens. A row is None where nothing precedes `first_token`."""
        result: dict[str, Any] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for row in rows:
            result["text_offset"].append(self.offset)
            if row is None:
                result["tokens"].append(first_token)
                result["token_logprobs"].append(None)
                result["top_logprobs"].append(None)
                self.offset += len(first_token)
                continue
            chosen = next(iter(row))
            shown = dict.fromkeys([*_top(row, self.num_top), chosen])
            result["tokens"].append(_name(chosen, row[chosen], self.as_ids))
            result["token_logprobs"].append(finite(row[chosen].logprob))
            result["top_logprobs"].append(
                {_name(i, row[i], self.as_ids): finite(row[i].logprob) for i in shown}
            )
            self.offset += len(row[chosen].decoded_token or "")
        return result


def _top(row: Row, num_top: int) -> list[int]:
    return sorted((i for i in row if row[i].rank <= num_top), key=lambda i: row[i].rank)[:num_top]


def _entry(token_id: int, entry: Logprob, as_ids: bool) -> dict[str, Any]:
    text = entry.decoded_token or ""
    return {
        "token": _name(token_id, entry, as_ids),
        "logprob": finite(entry.logprob),
        # A part of a character decodes to a replacement: its bytes are not those.
        "bytes": None if "\ufffd" in text else list(text.encode()),
    }


def _name(token_id: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else entry.decoded_token or ""


def finite(logprob: float) -> float:
    """JSON has no infinity: the least value that is sent, as vLLM does."""
    return max(logprob, LOWEST)
