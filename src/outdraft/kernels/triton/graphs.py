"""Passes of few rows as CUDA graphs: one launch instead of some hundreds.

A graph repeats the launches of one pass: with the same sizes, on the same addresses. So the rows of
a pass are copied into buffers of its own, and sizes are rounded up. Rows after the last request
are padding that is kept nowhere, and requests after the last one have no rows. The first pass runs
launch by launch, which compiles what it needs; then each new size becomes a graph.

Rows that are padded are no other rows: the same sizes are computed alike with a graph or without.

Dimension key: T rows, B requests, P blocks, D state, K tapped layers; all but D and K rounded up.
"""

import gc
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from triton import cdiv

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.kernels.data.graph_sizes import (
    MOST_GRAPHS,
    MOST_ROWS,
    TREE_ROWS,
    rounded_len,
    rounded_requests,
    rounded_rows,
)
from outdraft.kernels.ops import WarmUps
from outdraft.kernels.triton.padding import pad_rows

MOST_REQUESTS = rounded_requests(MOST_ROWS)

# Token ids, caches, metadata, taps, states; gives states and tapped streams of all rows.
RunPass = Callable[
    [Tensor, Sequence[LayerCache], AttentionMetadata, Sequence[int], Tensor | None],
    tuple[Tensor, Tensor],
]
Replay = Callable[[], object]
Result = TypeVar("Result")
Made = TypeVar("Made")
Kept = TypeVar("Kept")
_logger = logging.getLogger(__name__)


class Capture(Protocol):
    """Makes a graph of launches."""

    def __call__(self, launch: Callable[[], Result]) -> tuple[Replay, Result]:
        """A function that repeats the launches, and their results, which it computes anew."""
        ...


class MadeGraphs(Generic[Made]):
    """Graphs by what they launch and for which sizes.

    What is launched for the first time compiles kernels and allocates what libraries need, and so
    becomes no graph. Later each new size of it becomes one at once: to make it takes about as long
    as its launches would.
    """

    def __init__(self, warm_ups: WarmUps) -> None:
        """`warm_ups`: counts first launches, and graphs that are made."""
        self._warm_ups = warm_ups
        self._launched = set[object]()
        self._made: dict[object, Made] = {}
        self._is_full = False  # and that was said

    def find(self, launches: object, sizes: object, make: Callable[[], Made]) -> Made | None:
        """The graph, which `make` makes; None: the launches are new, or there are too many graphs.

        Args:
            launches: equal where the same kernels are launched.
            sizes: equal for all calls of a graph.
        """
        if launches not in self._launched:
            self._launched.add(launches)
            self._warm_ups.count += 1
            return None
        kind = launches, sizes
        if kind not in self._made:
            if len(self._made) >= MOST_GRAPHS:
                if not self._is_full:
                    self._is_full = True
                    _logger.warning(
                        "%d graphs are made: steps of other sizes launch kernel by kernel from now "
                        "on, which takes longer",
                        MOST_GRAPHS,
                    )
                return None
            self._made[kind] = make()
            self._warm_ups.count += 1
        return self._made[kind]


class PerCache(Generic[Kept]):
    """Something for each cache that lives: graphs hold the addresses of the one they read."""

    def __init__(self, make: Callable[[], Kept]) -> None:
        self._make, self._by_keys = make, WeakIdKeyDictionary()

    def of(self, keys_PSGC: Tensor) -> Kept:
        """`keys_PSGC`: of the cache's first layer."""
        if keys_PSGC not in self._by_keys:
            self._by_keys[keys_PSGC] = self._make()
        return cast(Kept, self._by_keys[keys_PSGC])


@dataclass(frozen=True, slots=True)
class PassSizes:
    """The sizes that all passes of a graph have in common."""

    num_rows: int
    num_requests: int
    max_rows: int
    max_seq_len: int
    num_blocks: int  # of the longest request
    taps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _PassGraph:
    replay: Replay
    results: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _CacheGraphs:
    """The graphs on one cache, by `PassSizes`."""

    capture: Capture
    made: MadeGraphs[_PassGraph]


class GraphedPasses:
    """Runs passes, and repeats those whose sizes it has seen."""

    def __init__(
        self,
        run: RunPass,
        few_rows: int,
        warm_ups: WarmUps,
        new_capture: Callable[[], Capture] | None = None,
    ) -> None:
        """
        Args:
            run: the launches of a pass.
            few_rows: attention is launched in one way if no request has more rows, in two if one
                has, and in three if one has more than TREE_ROWS.
            warm_ups: counts sizes that are new, and graphs.
            new_capture: makes the graphs on one cache; None: that of the device.
        """
        self._run, self._few_rows, self._warm_ups = run, few_rows, warm_ups
        self._new_capture = new_capture or DeviceCapture
        self._rows: dict[int, _PassBuffers] = {}  # by the most blocks of one request
        self._graphs = PerCache(self._new_graphs)

    def can_run(self, num_rows: int) -> bool:
        """The pass is one of few rows."""
        return 0 < num_rows <= MOST_ROWS

    def __call__(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int],
        states_TD: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The results of `run`, in tensors of their own."""
        num_rows = len(token_ids_T)
        sizes = self._sizes(num_rows, metadata, caches[0].k_PSGC.shape[1], tuple(taps))
        rows = self._rows_for(sizes.num_blocks, caches[0].k_PSGC, states_TD)
        rows.take(sizes, token_ids_T, metadata, states_TD)
        graphs = self._graphs.of(caches[0].k_PSGC)

        def launch() -> tuple[Tensor, Tensor]:
            return self._run(*rows.of(sizes, caches, has_states=states_TD is not None))

        launches = sizes.max_rows, sizes.num_requests == 1, states_TD is not None, sizes.taps
        graph = graphs.made.find(launches, sizes, lambda: _PassGraph(*graphs.capture(launch)))
        if graph is None:
            out_TD, tapped_TKD = launch()
            return out_TD[:num_rows], tapped_TKD[:num_rows]
        graph.replay()
        out_TD, tapped_TKD = graph.results
        tapped_TKD = tapped_TKD[:num_rows]
        return out_TD[:num_rows].clone(), tapped_TKD.clone() if taps else tapped_TKD

    def _new_graphs(self) -> _CacheGraphs:
        return _CacheGraphs(self._new_capture(), MadeGraphs(self._warm_ups))

    def _sizes(
        self, num_rows: int, metadata: AttentionMetadata, block_size: int, taps: tuple[int, ...]
    ) -> PassSizes:
        num_requests, num_blocks = metadata.block_table_BP.shape
        seq_len = rounded_len(max(metadata.max_seq_len, num_blocks * block_size))
        kinds = self._few_rows, TREE_ROWS, MOST_ROWS
        return PassSizes(
            num_rows=rounded_rows(num_rows),
            num_requests=rounded_requests(num_requests),
            max_rows=min(most for most in kinds if metadata.max_rows <= most),
            max_seq_len=seq_len,
            num_blocks=cdiv(seq_len, block_size),
            taps=taps,
        )

    def _rows_for(
        self, num_blocks: int, keys_PSGC: Tensor, states_TD: Tensor | None
    ) -> "_PassBuffers":
        """Buffers. Graphs of shorter texts go on to read their own."""
        if num_blocks not in self._rows:
            state_size = 0 if states_TD is None else states_TD.shape[1]
            dtype = keys_PSGC.dtype if states_TD is None else states_TD.dtype
            self._rows[num_blocks] = _PassBuffers(keys_PSGC.device, num_blocks, state_size, dtype)
        return self._rows[num_blocks]


class _PassBuffers:
    """Tensors that the graphs of a network read. `num_blocks`: most of one request."""

    def __init__(
        self, device: torch.device, num_blocks: int, state_size: int, state_dtype: torch.dtype
    ) -> None:
        # Token ids, positions, slots and ancestors.
        self._by_row_4T = torch.zeros(4, MOST_ROWS, dtype=torch.int64, device=device)
        # First rows (one more than requests), lengths of contexts, numbers of causal rows. Each
        # begins at a multiple of 16 bytes.
        self._by_request_3B = torch.zeros(3, MOST_REQUESTS + 4, dtype=torch.int32, device=device)
        self._table = torch.zeros(MOST_REQUESTS * num_blocks, dtype=torch.int32, device=device)
        self._states_TD = torch.zeros(MOST_ROWS, state_size, dtype=state_dtype, device=device)

    def take(
        self,
        sizes: PassSizes,
        token_ids_T: Tensor,
        metadata: AttentionMetadata,
        states_TD: Tensor | None,
    ) -> None:
        """Copy a pass, and pad it."""
        padded = self._metadata(sizes)
        pad_rows(token_ids_T, metadata, self._by_row_4T[0, : sizes.num_rows], padded)
        if states_TD is not None:
            self._states_TD[: len(states_TD)].copy_(states_TD)

    def of(
        self, sizes: PassSizes, caches: Sequence[LayerCache], *, has_states: bool
    ) -> tuple[Tensor, Sequence[LayerCache], AttentionMetadata, Sequence[int], Tensor | None]:
        """The arguments of a pass of these sizes."""
        states_TD = self._states_TD[: sizes.num_rows] if has_states else None
        ids_T = self._by_row_4T[0, : sizes.num_rows]
        return ids_T, caches, self._metadata(sizes), sizes.taps, states_TD

    def _metadata(self, sizes: PassSizes) -> AttentionMetadata:
        num_requests, num_blocks = sizes.num_requests, sizes.num_blocks
        _, positions_T, slots_T, ancestors_T = self._by_row_4T[:, : sizes.num_rows]
        starts_B, contexts_B, num_causal_B = self._by_request_3B
        return AttentionMetadata(
            query_start_B1=starts_B[: num_requests + 1],
            context_lens_B=contexts_B[:num_requests],
            num_causal_B=num_causal_B[:num_requests],
            ancestors_T=ancestors_T,
            positions_T=positions_T,
            slots_T=slots_T,
            block_table_BP=self._table[: num_requests * num_blocks].view(num_requests, num_blocks),
            max_rows=sizes.max_rows,
            max_seq_len=sizes.max_seq_len,
        )


class DeviceCapture:
    """Makes CUDA graphs whose passing results share memory: no two of them run at once."""

    def __init__(self) -> None:
        self._pool: Any = None  # a handle
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, launch: Callable[[], Result]) -> tuple[Replay, Result]:
        """Capture the launches. Their results are not there before the first replay.

        `torch.cuda.graph` would wait for the device and give all spare memory back each time.
        """
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.stream(self._stream):
            # Kernels may be loaded meanwhile, and other threads may allocate and copy.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                results = launch()
            finally:
                graph.capture_end()
        return graph.replay, results


@contextmanager
def _no_collection() -> Generator[None]:
    """Nothing is collected meanwhile: to destroy an old graph would spoil the one that is made."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
