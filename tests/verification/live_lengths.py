"""How long live rules let chains become, for tokens that are told beforehand."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from outdraft.core.decision import LiveStop
from outdraft.drafting.device.asks import DraftModelAsk
from outdraft.drafting.device.live_stop import LiveStops, stop_rules

Chain = tuple[int, ...]


def live_lengths(
    proposer: Callable[[int, Chain], np.ndarray],
    chains: Sequence[Chain],
    stops: Sequence[LiveStop | None],
    wanted: Sequence[int],
    num_host_rows: int = 0,
    told: Callable[[int, Chain, int], float] | None = None,
) -> tuple[int, ...]:
    """Tokens that are drafted for each request, as the engine's own rule has it.

    proposer: (request, prefix) -> probabilities [V]. chains: tokens that would be drawn, by
    request, at least as many as are wanted. told: (request, chain, level) -> log-odds of the level
    that the network tells in the place of its margin.
    """
    depth = max(wanted)
    asks = [
        DraftModelAsk(row, 9, 9, count, (0,), (), stop)
        for row, (count, stop) in enumerate(zip(wanted, stops, strict=True))
    ]
    rules = stop_rules(asks, num_host_rows, torch.device("cpu"))
    if rules is None:
        return tuple(wanted)
    live = LiveStops(torch.tensor(wanted), rules)
    for level in range(depth):
        probs = [proposer(which, tuple(chain[:level])) for which, chain in enumerate(chains)]
        odds_B = None
        if told is not None:
            odds_B = torch.tensor([told(which, one, level) for which, one in enumerate(chains)])
        live.look(torch.tensor(np.array(probs)).log(), odds_B)
    return tuple(live.num_drafts_B.tolist())
