"""What passes may take before anything was measured: from the bytes of weights that they read."""

from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.core.draft import DraftSource

BYTES_PER_S = {"cpu": 2.0e10, "cuda": 2.0e12}  # from memory
ROWS_PER_READ = {"cpu": 12, "cuda": 150}  # that are computed while the weights are read once
FLOOR_S = {"cpu": 1e-4, "cuda": 5e-4}  # of a pass, however small
HOST_S, HOST_REQUEST_S, OFFER_S = 3e-4, 2e-5, 1e-5
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def prior_costs(
    device: str, target_bytes: int, drafters: dict[DraftSource, tuple[int, int]]
) -> CostTable:
    """A table for a kind of device, "cpu" or "cuda"; steps correct it.

    target_bytes: of the weights that a pass of the target reads.
    drafters: the same, and the most passes of a draft, of each network that drafts.
    """
    return CostTable(
        _curve(device, target_bytes),
        drafters={
            str(source): DrafterCost(
                _curve(device, num_bytes), _curve(device, num_bytes), max_passes=max_passes
            )
            for source, (num_bytes, max_passes) in drafters.items()
        },
        host_s=HOST_S,
        host_request_s=HOST_REQUEST_S,
        offer_s=OFFER_S,
    )


def _curve(device: str, num_bytes: int) -> CostCurve:
    read_s, floor_s = num_bytes / BYTES_PER_S[device], FLOOR_S[device]
    rows_s = read_s / ROWS_PER_READ[device]
    return CostCurve(ROWS, tuple(floor_s + max(read_s, rows * rows_s) for rows in ROWS))
