"""Least times of passes, from bytes and operations: costs before anything is measured.

A pass reads every weight once, whatever its rows are, and multiplies each row with every weight.
It reads those experts that some row meets: more rows, drafted ones too, meet more of them.
Reading and multiplying overlap, so the longer one counts ("LLM Inference Unveiled", arXiv
2402.16363); near the ridge neither reaches its peak. Where kernels are launched layer by layer,
a pass takes at least the time of these launches. The time for the kernels of a layer to begin
and to end comes on top, and so do the host's part of a pass and reading keys and values: bytes of a
token divided by the bandwidth, for each token of the contexts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.core.weights import RoutedWeights

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)


def overlapped(
    reading_s: np.ndarray | float, multiplying_s: np.ndarray | float
) -> np.ndarray | float:
    """Seconds of both at once: the longer one, and 19 % more where they are equal."""
    return (reading_s**4 + multiplying_s**4) ** 0.25


def pass_s(
    computing_s: np.ndarray | float, num_layers: int, launch_s: float, begin_s: float
) -> np.ndarray | float:
    """Seconds of a pass that computes so long.

    Args:
        launch_s: of the host, to launch a layer; layers before it compute meanwhile.
        begin_s: for the kernels of a layer to begin and to end; nothing else happens then.
    """
    return np.maximum(computing_s, num_layers * launch_s) + num_layers * begin_s


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The most that a machine does.

    Attributes:
        bandwidth: bytes a second from the memory that holds the weights.
        peak: operations a second; a product and a sum are two.
        launch_s: of the host, to launch a layer, see `pass_s`.
        call_s: of the host, around each pass;
        host_s: around a step of one request,
        host_request_s: more for each further request, and
        host_draft_s: more where one drafts.
    """

    bandwidth: float
    peak: float
    launch_s: float = 0.0
    call_s: float = 0.0
    host_s: float = 0.0
    host_request_s: float = 0.0
    host_draft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PassSize:
    """Bytes that a pass of a network reads, and its operations.

    Attributes:
        weight_bytes: read once, whatever the number of rows; without those of experts.
        row_operations: of one row; two for each weight that it meets.
        token_bytes: keys and values of one token of a context.
        routed: the weights of experts; None: it has none.
    """

    weight_bytes: int
    row_operations: int
    token_bytes: int
    num_layers: int
    routed: RoutedWeights | None = None

    def curve(self, machine: MachineLimits, rows: Sequence[int] = ROWS) -> CostCurve:
        """Passes without contexts."""
        multiplying_s = np.array(rows) * (self.row_operations / machine.peak)
        num_bytes = np.full(len(rows), float(self.weight_bytes))
        if self.routed is not None:
            num_bytes += self.routed.bytes_read(np.array(rows))
        seconds = overlapped(num_bytes / machine.bandwidth, multiplying_s)
        seconds = machine.call_s + pass_s(seconds, self.num_layers, machine.launch_s, 0.0)
        return CostCurve(tuple(rows), tuple(np.atleast_1d(seconds).tolist()))


def prior_table(
    machine: MachineLimits,
    target: PassSize,
    drafters: dict[str, tuple[PassSize, int]] | None = None,
    rows: Sequence[int] = ROWS,
) -> CostTable:
    """Costs of a pair of models that was not measured.

    Catching up is part of a pass that is made anyway: it costs only its rows' share.

    Args:
        drafters: by name, the size of a pass, and the most passes of a draft.
        rows: the points of the curves.
    """
    found: dict[str, DrafterCost] = {}
    for name, (size, max_passes) in (drafters or {}).items():
        passes = size.curve(machine, rows)
        more = tuple(seconds - passes.seconds[0] for seconds in passes.seconds)
        found[name] = DrafterCost(
            passes,
            CostCurve(passes.rows, more),
            start_s=machine.call_s,
            context_s=size.token_bytes / machine.bandwidth,
            max_passes=max_passes,
        )
    return CostTable(
        target.curve(machine, rows),
        context_s=target.token_bytes / machine.bandwidth,
        drafters=found,
        host_s=machine.host_s,
        host_request_s=machine.host_request_s,
        host_draft_s=machine.host_draft_s,
    )
