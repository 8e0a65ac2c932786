"""Rows of logits: how many exist at the same time, and the log-probabilities of their tokens.

A vocabulary may have 150,000 tokens, and a step thousands of rows. The verdict on a row depends
on the rows of its own request only, so requests are verified a few at a time.

Dimension key: R rows, K best tokens.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Bytes of one tensor of logits. On a GPU, which has more memory and reads the head again for each
# part, hundreds of rows of a large vocabulary are a part.
PART_BYTES, PART_BYTES_ON_DEVICE = 16 << 20, 192 << 20
# Bytes of the probabilities that all drafts of a step were drawn from. They are kept until these
# are verified, and once more as the levels become one tensor.
DRAWN_BYTES, DRAWN_BYTES_ON_DEVICE = 256 << 20, 4 << 30
# Logits that are scored at the same time in torch. On a CPU each temporary tensor has half a
# megabyte: C libraries reuse aligned memory badly, and tensors of all logits would take several
# times their memory. A GPU takes hardly longer for some rows than for one.
SCORED_LOGITS, SCORED_ON_DEVICE = 1 << 17, 1 << 22


def most_logit_rows(vocab_size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of a part, one at least. A request that alone has more rows is a part, too.

    Args:
        dtype: of the logits.
    """
    most_bytes = PART_BYTES if device.type == "cpu" else PART_BYTES_ON_DEVICE
    return max(1, most_bytes // (vocab_size * dtype.itemsize))


def most_drawn(vocab_size: int, device: torch.device) -> int:
    """Drafts of a step that are drawn from probabilities, which are float32; as if all requests
    that the network drafts for had as many."""
    most_bytes = DRAWN_BYTES if device.type == "cpu" else DRAWN_BYTES_ON_DEVICE
    return most_bytes // (vocab_size * torch.float32.itemsize)


class RequestPart(NamedTuple):
    """Requests of a step that follow each other, and their flat rows.

    Attributes:
        width: most drafts of one of them.
    """

    requests: slice
    rows: slice
    width: int


def request_parts(
    num_drafts: Sequence[int], most_rows: int, *, is_padded: bool = False
) -> list[RequestPart]:
    """All requests, one at least, in as few parts as their order allows.

    Args:
        num_drafts: of each request; it has one row more.
        is_padded: requests count as if all in their part had as many drafts.
    """
    parts: list[RequestPart] = []
    starts = [0, *itertools.accumulate(count + 1 for count in num_drafts)]
    first = width = 0
    for request, count in enumerate(num_drafts):
        number, widest = request + 1 - first, max(width, count)
        rows = number * (widest + 1) if is_padded else starts[request + 1] - starts[first]
        if number > 1 and rows > most_rows:
            parts.append(_part(first, request, width, starts))
            first, widest = request, count
        width = widest
    parts.append(_part(first, len(num_drafts), width, starts))
    return parts


def _part(first: int, end: int, width: int, starts: Sequence[int]) -> RequestPart:
    return RequestPart(slice(first, end), slice(starts[first], starts[end]), width)


class Scores(NamedTuple):
    """Log-probabilities, float32, of one chosen token of each row and of the K best ones.

    A rank is 1 for the best token; ties share the better rank, and of them the lowest ids come
    first among the best. Ranks and ids are int64.
    """

    logprobs_R: Tensor
    ranks_R: Tensor
    top_ids_RK: Tensor
    top_logprobs_RK: Tensor


def concatenated(scores: Sequence[Scores]) -> Scores:
    """The scores of all rows, one at least."""
    return Scores(*map(torch.cat, zip(*scores, strict=True)))
