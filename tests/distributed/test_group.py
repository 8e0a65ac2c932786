"""Ranks of a group against the same operations on whole tensors, over memory and over sockets."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from outdraft.core.errors import RanksError
from outdraft.distributed.group import Ranks, RequestShares
from outdraft.distributed.process_groups import EXCHANGED_BYTES
from outdraft.kernels.choose import has_library, memory_transports
from tests import ranks

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)


@pytest.fixture(
    params=[
        "sockets",
        pytest.param("memory", marks=pytest.mark.skipif(not has_library(), reason="no library")),
    ]
)
def on_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """As ranks.on_ranks, over one of the transports."""
    transports = memory_transports() if request.param == "memory" else None
    return partial(ranks.on_ranks, over_memory=[transports] * 4)


def parts_of(size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    parts = torch.randn(size, *shape, generator=generator, dtype=torch.float64) * 100
    return list(parts.to(dtype))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_sum_has_the_same_bits_in_calls_of_any_number_of_rows(
    on_ranks: Callable[..., list[Any]], size: int, dtype: torch.dtype
) -> None:
    parts = parts_of(size, dtype, (64, 33))

    def work(ranks: Ranks) -> list[torch.Tensor]:
        own = parts[ranks.target.rank]
        whole = ranks.target.sum(own)
        for rows in (1, 2, 5):
            assert torch.equal(torch.cat([ranks.target.sum(o) for o in own.split(rows)]), whole)
        return [whole]

    sums = [result[0] for result in on_ranks(size, 1, work)]
    assert all(torch.equal(one, sums[0]) for one in sums)
    expected = torch.stack(parts).double().sum(0)
    scale = torch.stack(parts).double().abs().sum(0)
    eps = 0.0 if dtype == torch.int64 else torch.finfo(dtype).eps
    assert ((sums[0].double() - expected).abs() <= size * eps * scale).all()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_gather_join_and_turn_what_they_have(
    on_ranks: Callable[..., list[Any]], size: int, dtype: torch.dtype
) -> None:
    counts = [3, 0, 1, 2][:size]
    whole_RV = parts_of(1, dtype, (sum(counts), 5 * size))[0]
    rows = list(whole_RV.split(counts))
    columns = whole_RV.split(5, dim=1)

    def work(ranks: Ranks) -> list[torch.Tensor]:
        group = ranks.target
        own = columns[group.rank]
        return [
            group.gather(own),
            group.join_rows(rows[group.rank], counts),
            group.turn(own, counts),
        ]

    for rank, (gathered, stacked, turned) in enumerate(on_ranks(size, 1, work)):
        assert torch.equal(gathered, torch.stack(columns))
        assert torch.equal(stacked, whole_RV)
        assert torch.equal(turned, rows[rank])


@pytest.mark.parametrize("more_bytes", [0, 8])
def test_ranks_gather_what_is_exchanged_and_what_is_too_much_for_it(
    on_ranks: Callable[..., list[Any]], more_bytes: int
) -> None:
    parts = parts_of(2, torch.int64, ((EXCHANGED_BYTES + more_bytes) // 8,))
    gathered = on_ranks(2, 1, lambda ranks: ranks.target.gather(parts[ranks.target.rank]))
    assert all(torch.equal(one, torch.stack(parts)) for one in gathered)


def test_what_a_rank_sends_is_counted(on_ranks: Callable[..., list[Any]]) -> None:
    def work(ranks: Ranks) -> dict[str, int]:
        group = ranks.target
        group.sum(torch.zeros(3, 8))
        group.turn(torch.zeros(6, 2), [1, 2, 0, 3])
        return dict(group.sent_bytes)

    for rank, sent in enumerate(on_ranks(4, 1, work)):
        own = [1, 2, 0, 3][rank]
        assert sent == {"sum": 3 * 3 * 8 * 4, "turn": (6 - own) * 2 * 4}


@pytest.mark.parametrize(("size", "draft_size"), [(4, 1), (4, 2), (4, 4), (2, 1), (2, 2)])
def test_each_rank_knows_its_draft_group(
    on_ranks: Callable[..., list[Any]], size: int, draft_size: int
) -> None:
    def work(ranks: Ranks) -> tuple[list[int], int, int]:
        own = torch.tensor([ranks.target.rank])
        members = ranks.draft.gather(own).flatten().tolist()
        return members, ranks.draft_group, ranks.num_draft_groups

    for rank, (members, group, number) in enumerate(on_ranks(size, draft_size, work)):
        assert members == [
            other for other in range(size) if other // draft_size == rank // draft_size
        ]
        assert (group, number) == (rank // draft_size, size // draft_size)


@pytest.mark.parametrize("counts", [(2, 1), (0, 3), (1, 0, 2, 1), (0, 0, 0, 1)])
def test_each_rank_gets_whole_rows_of_its_requests(
    on_ranks: Callable[..., list[Any]], counts: tuple[int, ...]
) -> None:
    """Some requests have no row, or ranks no request; the last columns stand for nothing."""
    num_each, num_columns = 3, 5 * len(counts) - 2
    whole_RV = parts_of(1, torch.float64, (sum(counts) * num_each, 5 * len(counts)))[0]
    owners = [request for request in range(sum(counts)) for _ in range((request + 1) % 3)]

    def work(ranks: Ranks) -> list[torch.Tensor]:
        shares = RequestShares(ranks.target, counts)
        columns_RS = whole_RV.split(5, dim=1)[ranks.target.rank]
        turned = shares.turn(columns_RS, num_columns)
        some = shares.of_rows(owners)
        texts = some.own(torch.tensor(owners))
        assert ((texts >= shares.first) & (texts < shares.first + counts[shares.group.rank])).all()
        return [turned, shares.join(turned[::num_each]), some.join(texts)]

    found = on_ranks(len(counts), 1, work)
    assert torch.equal(torch.cat([one[0] for one in found]), whole_RV[:, :num_columns])
    for turned, joined, texts in found:
        assert turned.is_contiguous()
        assert torch.equal(joined, whole_RV[::num_each, :num_columns])
        assert texts.tolist() == owners


def test_each_operation_is_seen_from_outside(on_ranks: Callable[..., list[Any]]) -> None:
    part = torch.ones(4, 3)

    def work(ranks: Ranks) -> list[int]:
        group, seen = ranks.target, [ranks.num_messages]
        for call in (group.sum, group.gather, partial(group.turn, counts=[2, 2])):
            call(part)
            seen.append(ranks.num_messages)
        return seen

    for seen in on_ranks(2, 1, work):
        assert seen == sorted(set(seen))


def test_a_rank_that_is_left_alone_says_so(on_ranks: Callable[..., list[Any]]) -> None:
    def work(ranks: Ranks) -> None:
        if ranks.target.rank == 0:
            ranks.target.sum(torch.zeros(1))

    with pytest.raises(RanksError, match="another rank does not answer"):
        on_ranks(2, 1, work)
