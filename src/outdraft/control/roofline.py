"""What passes take at least, from bytes and operations: costs before anything was measured.

A pass takes as long as the slowest of three things: its weights have to be read once, each row
takes its products, and each layer takes the launches of its kernels, where a device is told what
to do layer by layer. What the host does around a pass comes on top, and so does reading keys and
values: bytes of a token divided by the bandwidth, for each token of the contexts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outdraft.control.costs import CostCurve, CostTable, DrafterCost

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine does at most.

    Attributes:
        bandwidth: bytes a second from the memory that holds the weights.
        peak: operations a second; a product and a sum are two.
        layer_s: seconds that a layer takes at least, however little it computes.
        call_s: of the host, around each pass.
    """

    bandwidth: float
    peak: float
    layer_s: float = 0.0
    call_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PassSize:
    """What a pass of a network reads and computes.

    Attributes:
        weight_bytes: read once, whatever the number of rows.
        row_operations: of one row; two for each weight that it meets.
        token_bytes: keys and values of one token of a context.
    """

    weight_bytes: int
    row_operations: int
    token_bytes: int
    num_layers: int

    def seconds(self, num_rows: int, machine: Machine) -> float:
        """A pass without contexts."""
        reading = self.weight_bytes / machine.bandwidth
        computing = num_rows * self.row_operations / machine.peak
        return machine.call_s + max(reading, computing, self.num_layers * machine.layer_s)

    def curve(self, machine: Machine, rows: Sequence[int] = ROWS) -> CostCurve:
        return CostCurve(tuple(rows), tuple(self.seconds(count, machine) for count in rows))


def prior_table(
    machine: Machine,
    target: PassSize,
    drafters: dict[str, tuple[PassSize, int]] | None = None,
    rows: Sequence[int] = ROWS,
) -> CostTable:
    """Costs of a pair of models that nobody has measured.

    Catching up rides in a pass that is made anyway: it takes what its rows add to that.

    Args:
        drafters: by name, what a pass of each takes, and the most passes of a draft.
        rows: where the curves have points.
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
        host_s=machine.call_s,
        host_request_s=machine.call_s / 10,
    )
