"""Acceptance of networks' drafts in a trace, which replays take for the truth.

A network cannot draft again without the target's states, so a replay draws its luck from these
curves: by level, and shifted for each request by how much easier than others it was.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

import numpy as np

from outdraft.config.speculation import NETWORK_SOURCES
from outdraft.control.chances import logit, sigmoid
from outdraft.core.draft import DraftSource
from outdraft.core.recorded import RecordedRequest

PRIOR_CHANCE, LEANING = 0.6, 10.0  # of a level that leans on the one above; labels
OFFSET_INFORMATION, MAX_OFFSET = 4.0, 4.0  # of "as easy as others", as 16 labels; logits
NEWTON_STEPS = 8
BLOCK = 256  # places of a text


def level_chances(drafts: Sequence[tuple[int, int]]) -> tuple[list[float], list[int]]:
    """Chances by level, given that the levels above were accepted, and the drafts that reached it.

    Few drafts lean on the level above. `drafts`: (levels drafted, levels accepted) of each.
    """
    above, chances, labels = PRIOR_CHANCE, list[float](), list[int]()
    for level in range(max((drafted for drafted, _ in drafts), default=0)):
        found = [accepted > level for drafted, accepted in drafts if accepted >= level < drafted]
        above = (sum(found) + LEANING * above) / (len(found) + LEANING)
        chances.append(above)
        labels.append(len(found))
    return chances, labels


class RecordedAcceptance:
    """The curves of one network by rule, and the luck of each request at each place of its text.

    Luck is drawn from the request's number and the place, so two policies meet the same.

    Attributes:
        chances, labels: of all rules together, see `level_chances`.
    """

    def __init__(self, source: DraftSource, requests: Sequence[RecordedRequest]) -> None:
        self.source = source
        by_rule: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for request in requests:
            by_rule[request.rule] += network_drafts(source, request)
        self.chances, self.labels = level_chances([*chain.from_iterable(by_rule.values())])
        self._curves = {rule: level_chances(drafts)[0] for rule, drafts in by_rule.items()}
        self._offsets = [self._offset(request) for request in requests]
        self._coins: dict[tuple[int, int], list[float]] = {}

    def accepted(self, index: int, rule: str, sequence: int, place: int, drafted: int) -> int:
        """Levels of a draft that are accepted.

        Args:
            index: of the request in the trace.
            sequence: which text of the replay it is; its luck is its own.
            place: tokens of the output that are there.
            drafted: levels.
        """
        chances, offset = self._curve(rule), self._offsets[index]
        for level in range(drafted):
            chance = _shifted(chances[min(level, len(chances) - 1)], offset)
            if self._coin(sequence, place + level) >= chance:
                return level
        return drafted

    def _curve(self, rule: str) -> Sequence[float]:
        return self._curves.get(rule) or self.chances

    def _coin(self, sequence: int, place: int) -> float:
        block, at = divmod(place, BLOCK)
        key = sequence, block
        if key not in self._coins:
            rng = np.random.default_rng([0, sequence, block])
            self._coins[key] = rng.random(BLOCK).tolist()
        return self._coins[key][at]

    def _offset(self, request: RecordedRequest) -> float:
        """In logits: the most likely one, if requests differ as the prior says."""
        labels = list[tuple[float, int]]()
        for drafted, accepted in network_drafts(self.source, request):
            chances = self._curve(request.rule)[:drafted]
            labels += [(one, at < accepted) for at, one in enumerate(chances[: accepted + 1])]
        offset = 0.0
        for _ in range(NEWTON_STEPS):
            shifted = [_shifted(chance, offset) for chance, _ in labels]
            excess = sum(label for _, label in labels) - sum(shifted)
            information = OFFSET_INFORMATION + sum(chance * (1 - chance) for chance in shifted)
            offset += (excess - OFFSET_INFORMATION * offset) / information
            offset = max(-MAX_OFFSET, min(MAX_OFFSET, offset))
        return offset


def network_drafts(source: DraftSource, request: RecordedRequest) -> Iterator[tuple[int, int]]:
    """(levels drafted, levels accepted) of each step in which this network alone drafted."""
    ends = list(accumulate(request.tree))
    for step in (step for output in request.outputs for step in output.steps):
        if list(step.drafted) == [source]:
            rows, accepted = step.drafted[source], step.accepted.get(source, 0)
            levels = bisect_right(ends, rows) if ends else rows
            yield max(levels, accepted), accepted


def recorded_networks(requests: Sequence[RecordedRequest]) -> list[DraftSource]:
    """The networks that drafted in a trace."""
    outputs = [output for request in requests for output in request.outputs]
    named = {name for output in outputs for step in output.steps for name in step.drafted}
    return [source for source in DraftSource if source in NETWORK_SOURCES and source in named]


def _shifted(chance: float, offset: float) -> float:
    return sigmoid(logit(chance) + offset) if 0 < chance < 1 else chance
