"""Ranks that exchange through memory: what crosses, how a group ends, who shares what."""

import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore  # torch.distributed does not name it

from outdraft.core.errors import RanksError
from outdraft.distributed.group import RankGroup, Ranks
from outdraft.distributed.process_groups import ProcessTransport
from outdraft.distributed.shared_memory import BOOT, shared_memory
from outdraft.kernels.choose import has_library, memory_transports
from outdraft.kernels.native.ranks import MemoryTransport
from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(not has_library(), reason="no library for this machine")

BUFFER = 1 << 18  # bytes, of csrc/ranks.cpp
SOON = timedelta(seconds=20)
TWO_PROCESSES = """
import sys, torch
from datetime import timedelta
from torch.distributed import TCPStore
from outdraft.distributed.process_groups import join_ranks
from outdraft.kernels.choose import memory_transports

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60), wait_for_workers=False)
print(store.port, flush=True)
ranks = join_ranks(store, rank, 2, 1, torch.device("cpu"), 60.0, memory_transports())
for step in range(500):
    own = torch.arange(step) * (rank + 1)
    [first, second] = ranks.target.gather(own)
    assert torch.equal(first * 2, second)
    assert ranks.target.sum(torch.tensor([rank + 1.0])).item() == 3.0
maps = open("/proc/self/maps").read() if sys.platform == "linux" else "(deleted)"
print(type(ranks.target.transport).__name__, "(deleted)" in maps, flush=True)
"""


def bits_of(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.int64])
def test_sums_have_the_bits_of_those_over_sockets(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    counts = (0, 1, 33, BUFFER // 2 + 19)
    parts = [
        (torch.randn(size, count, generator=generator, dtype=torch.float64) * 9).to(dtype)
        for count in counts
    ]
    if dtype.is_floating_point:
        rare = torch.tensor([-0.0, float("inf"), 1e-40, 3e38, -3e38]).to(dtype)
        parts.append(torch.stack([rare.roll(rank) for rank in range(size)]))
        parts.append(torch.full((size, 3), -0.0, dtype=dtype))

    def work(ranks: Ranks) -> list[list[int]]:
        own = [part[ranks.target.rank] for part in parts]
        return [bits_of(ranks.target.sum(one)) for one in own]

    assert on_ranks(size, 1, work) == on_ranks(size, 1, work, over_memory=[None] * size)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("num_bytes", [0, 1, BUFFER - 1, BUFFER, BUFFER + 1, 3 * BUFFER + 5])
def test_messages_of_any_size_are_gathered_whole(size: int, num_bytes: int) -> None:
    generator = torch.Generator().manual_seed(num_bytes)
    parts = torch.randint(256, (size, num_bytes), generator=generator, dtype=torch.uint8)

    def work(ranks: Ranks) -> Tensor:
        return ranks.target.gather(parts[ranks.target.rank])

    assert all(torch.equal(gathered, parts) for gathered in on_ranks(size, 1, work))


@pytest.mark.parametrize("seed", range(6))
def test_uneven_and_empty_parts_are_exchanged_whole(seed: int) -> None:
    size = 2 + seed % 3
    generator = torch.Generator().manual_seed(seed)
    sizes = [0, 1, 77, BUFFER // size, BUFFER // size + 1, 2 * BUFFER + 3]
    chosen = torch.randint(len(sizes), (size, size), generator=generator).tolist()
    if seed == 0:
        chosen = [[0] * size] * size
    parts = [
        [torch.randint(256, (sizes[i],), generator=generator, dtype=torch.uint8) for i in row]
        for row in chosen
    ]

    def work(ranks: Ranks) -> Tensor:
        rank, transport = ranks.target.rank, ranks.target.transport
        assert isinstance(transport, MemoryTransport)
        sent = [len(part) for part in parts[rank]]
        received = [len(row[rank]) for row in parts]
        return transport.exchange(torch.cat(parts[rank]), sent, received)

    for rank, got in enumerate(on_ranks(size, 1, work)):
        assert torch.equal(got, torch.cat([row[rank] for row in parts]))


def test_many_small_messages_keep_their_order() -> None:
    def work(ranks: Ranks) -> None:
        group = ranks.target
        for step in range(3000):
            got = group.gather(torch.full((1 + step % 5,), step * group.size + group.rank))
            assert got.sum(1).tolist() == [
                (step * group.size + rank) * (1 + step % 5) for rank in range(group.size)
            ]

    on_ranks(3, 1, work)


def test_a_rank_that_does_not_answer_in_time_ends_the_group() -> None:
    has_failed = threading.Event()

    def work(ranks: Ranks) -> None:
        if ranks.target.rank == 0:
            with pytest.raises(RanksError, match="another rank does not answer in time"):
                ranks.target.sum(torch.zeros(1))
            has_failed.set()
        has_failed.wait()
        with pytest.raises(RanksError, match="the group has ended"):
            ranks.target.gather(torch.zeros(1))

    on_ranks(2, 1, work, timeout_s=0.2)


@pytest.mark.parametrize("operation", ["sum", "gather", "turn"])
@pytest.mark.parametrize("aborting", [0, 2])
def test_a_wait_ends_when_another_thread_of_any_rank_aborts(operation: str, aborting: int) -> None:
    have_failed = threading.Barrier(3)
    calls: dict[str, Callable[[RankGroup], Tensor]] = {
        "sum": lambda group: group.sum(torch.zeros(1)),
        "gather": lambda group: group.gather(torch.zeros(1)),
        "turn": lambda group: group.turn(torch.zeros(2, 1), [1, 1, 0]),
    }

    def work(ranks: Ranks) -> None:
        if ranks.target.rank == aborting:
            threading.Timer(0.1, ranks.abort).start()
        if ranks.target.rank != 2:
            with pytest.raises(RanksError, match="the group has ended"):
                calls[operation](ranks.target)
        have_failed.wait()
        with pytest.raises(RanksError, match="the group has ended"):
            calls[operation](ranks.target)

    on_ranks(3, 1, work)


def test_ranks_that_do_different_operations_are_told() -> None:
    def work(ranks: Ranks) -> None:
        with pytest.raises(RanksError, match=r"different operations|has ended"):
            ranks.target.gather(torch.zeros(1 + ranks.target.rank))

    on_ranks(2, 1, work)


@pytest.mark.parametrize("unable", [0, 1])
def test_a_rank_that_cannot_share_memory_is_reached_over_sockets(unable: int) -> None:
    transports = [memory_transports(), memory_transports()]
    transports[unable] = None

    def work(ranks: Ranks) -> tuple[type, list[int]]:
        own = torch.tensor([ranks.target.rank])
        return type(ranks.target.transport), ranks.target.gather(own).flatten().tolist()

    assert on_ranks(2, 1, work, over_memory=transports) == [(ProcessTransport, [0, 1])] * 2


@pytest.mark.parametrize("place", ["", "another-machine 1 2 {path}", "{machine} 1 2 {path}"])
def test_memory_of_another_machine_or_another_file_is_not_opened(
    tmp_path: Path, place: str
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(4096))
    machine = f"127.0.0.1/{BOOT.read_text().strip()}"
    store = HashStore()
    store.set("place", place.format(machine=machine, path=file))
    store.set("has-0", "yes")
    assert shared_memory(store, 1, 2, 4096, SOON) is None
    assert store.get("has-1") == b"no"


@pytest.mark.slow
def test_two_processes_share_memory_that_has_no_name() -> None:
    command = [sys.executable, "-c", TWO_PROCESSES]
    with subprocess.Popen([*command, "0", "0"], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        port = first.stdout.readline().strip()
        other = subprocess.run([*command, "1", port], capture_output=True, text=True, timeout=100)
        assert other.returncode == 0, other.stderr
        assert first.stdout.read().split() == ["MemoryTransport", "True"]
    assert other.stdout.split() == [port, "MemoryTransport", "True"]
    assert first.returncode == 0
