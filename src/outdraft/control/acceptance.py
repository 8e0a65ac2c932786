"""How likely the target accepts what a network drafts: by level, request, and live confidence.

A draft is accepted at level i, given that it was at the levels above, with the chance
sigmoid(level i's logit + the request's offset). Both follow the labels by online Newton steps: the
step is the label's error over the information gathered, which is bounded, so old labels fade. A
level that was seldom seen leans on the level above it: it moves where that one moves. The first one
begins at a prior.

How much requests differ is learned from those that ended, as the variance of a random effect (by
the method of moments: DerSimonian and Laird 1986). Where they are alike, a few labels do not move a
request's offset; where they differ, they do, and say little about other requests: with K one over
that variance, information I about one request is K I / (K + I) about all.

Live, the margin between a level's two largest logits sharpens the chance (`LiveLevel`). It is known
before the level's token is drawn, so a length may depend on it. What such a length leaves out has
no label; the chance that the margin gave it stands in, else levels would look better than they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outdraft.control.facts import DraftOutcome, StopRule
from outdraft.control.surprise import Surprise
from outdraft.core.draft import MAX_MARGIN

PRIOR_CHANCE = 0.6
LEANING = 2.0  # information of the level above; about 10 labels
MAX_INFORMATION = 100.0  # about 500 labels, of a request that drafts alone
NEWS_INFORMATION = 3.0  # what is left of it when chances turn out wrong
UNSEEN = 0.998  # of a level's information, per draft that did not reach it
OTHER_SHAPE = 0.9995  # of all, per draft of the same network in another shape,
UNSEEN_CHANGE = 1 / 2500  # and the variance of what its logits may have changed by meanwhile;
TOLD_OF_CHANGE = 3.0  # times what it tells of the logits, a label tells of that: trials are short
OFFSETS = 0.5  # standard deviation of requests' offsets, in logits, before any was seen,
OFFSETS_WEIGHT = 400.0  # of that, as of four requests with 40 labels each,
OFFSETS_MEMORY = 0.97  # and of what was learned, per request that ended
LEAST_OFFSETS, MOST_OFFSETS = 0.2, 1.2
MAX_OFFSET_INFORMATION = 50.0
MAX_OFFSET = 4.0
FIRM_INFORMATION = 50.0  # about 250 labels; optimism ends here,
OWN_DOUBT = 0.3  # and so much counts of what a request may differ from others by
MAX_LOGIT = 6.0
MIN_LIVE_LABELS = 50
BATCH = 8  # drafts that are learned from at once
FEW = 4  # requests for which arrays cost more than they save


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def logit(chance: float) -> float:
    return math.log(chance / (1 - chance))


@dataclass(slots=True)
class LiveLevel:
    """A logistic regression of one level's label on its margin, by Newton steps.

    information: [[a, b], [b, c]] of (weight, bias); it begins as a ridge.
    """

    weight: float = 0.0
    bias: float = 0.0
    a: float = 1.0
    b: float = 0.0
    c: float = 1.0
    num_labels: int = 0

    def observe(self, margin: float, offset: float, label: float) -> None:
        chance = sigmoid(self.weight * margin + self.bias + offset)
        variance = max(chance * (1 - chance), 1e-3)
        keep = 1 - variance / MAX_INFORMATION
        self.a = keep * self.a + variance * margin * margin
        self.b = keep * self.b + variance * margin
        self.c = keep * self.c + variance
        scale = (label - chance) / max(self.a * self.c - self.b * self.b, 1e-9)
        self.weight += scale * (self.c * margin - self.b)
        self.bias += scale * (self.a - self.b * margin)
        self.bias = max(-2 * MAX_LOGIT, min(2 * MAX_LOGIT, self.bias))
        self.weight = max(0.0, min(MAX_LOGIT, self.weight))  # a wide margin is no bad sign
        self.num_labels += 1


@dataclass(slots=True)
class Spread:
    """How much requests differ: the variance of their offsets.

    Labels of a request that have the variance V in sum are by e more often right than those of
    others. On average e * e is V + V * V * the variance of offsets.
    """

    squares: float = OFFSETS**2 * OFFSETS_WEIGHT
    weights: float = OFFSETS_WEIGHT

    def observe(self, excess: float, variance: float) -> None:
        """A request ended."""
        self.squares = OFFSETS_MEMORY * self.squares + excess * excess - variance
        self.weights = OFFSETS_MEMORY * self.weights + variance * variance

    @property
    def information(self) -> float:
        """What "no offset" counts as: about a fifth of as many labels."""
        variance = self.squares / self.weights
        return 1 / max(LEAST_OFFSETS**2, min(MOST_OFFSETS**2, variance))


@dataclass(slots=True)
class RequestOffset:
    """How much easier (above 0) than others a request is to draft for, in logits.

    Attributes:
        least: information of "no offset".
        excess, variance: of its labels beyond what others have, and what their variance should be.
        told: information that they are about all requests.
    """

    least: float
    value: float = 0.0
    information: float = field(init=False)
    excess: float = 0.0
    variance: float = 0.0
    told: float = 0.0

    def __post_init__(self) -> None:
        self.information = self.least

    def observe(self, excess: float, variance: float) -> None:
        self.information = min(self.information + variance, MAX_OFFSET_INFORMATION)
        self.value += excess / self.information
        self.value = max(-MAX_OFFSET, min(MAX_OFFSET, self.value))

    def compare(self, num_right: float, count: int, usual: float) -> None:
        """Labels, beside the chance for a request that nothing is known of."""
        self.excess += num_right - count * usual
        self.variance += count * usual * (1 - usual)


@dataclass(slots=True)
class Level:
    """One level's logit: a normal posterior around what the level above says."""

    logit: float
    information: float = 0.0

    def observe(
        self, label: float, offset: float, most: float, count: int = 1
    ) -> tuple[float, float]:
        """One label, or the mean of several; their error, and what its variance should be.

        most: information that counts of what was learned before.
        """
        chance = sigmoid(self.logit + offset)
        error, variance = count * (label - chance), count * chance * (1 - chance)
        self.information = min(self.information + variance, most)
        moved = self.logit + error / (self.information + LEANING)
        self.logit = max(-MAX_LOGIT, min(MAX_LOGIT, moved))
        return error, variance

    def follow(self, moved: float) -> None:
        """The level above moved by so much."""
        self.logit += moved * LEANING / (self.information + LEANING)

    def fade(self, above: float) -> None:
        """A draft went by that did not reach this level: lean more on the one above."""
        before = self.information + LEANING
        self.information *= UNSEEN
        keep = UNSEEN * before / (self.information + LEANING)
        self.logit = above + keep * (self.logit - above)


class NetworkCurve:
    """Acceptance of one network's drafts of one shape under one rule.

    Attributes:
        num_labels: of the first level.
        memory: information that counts of earlier labels; where each step brings more labels, more
            of them are as old.
    """

    def __init__(self, max_levels: int, prior: float = PRIOR_CHANCE) -> None:
        self.num_labels = 0
        self.memory = MAX_INFORMATION
        self._levels = [Level(logit(prior)) for _ in range(max_levels)]
        self._live = [LiveLevel() for _ in range(max_levels)]
        self._offsets: dict[str, RequestOffset] = {}
        self._differing = Spread()
        self._stop_parts: tuple[tuple[float, ...], tuple[float, ...]] | None = None
        self._surprise = Surprise()
        self._about_all = 0.0  # information about requests in general
        self._changed = 0.0  # variance of what its logits may have changed by, unseen

    @property
    def information(self) -> float:
        """About the first level."""
        return self._levels[0].information if self._levels else 0.0

    @property
    def logits(self) -> list[float]:
        """By level, for a request of which nothing is known."""
        return [level.logit for level in self._levels]

    @property
    def chances(self) -> list[float]:
        """By level, for a request of which nothing is known."""
        return [sigmoid(level.logit) for level in self._levels]

    def survivals(self, request_id: str, num_levels: int, *, optimism: float = 0.0) -> list[float]:
        """By level: the chance that a draft is accepted so far. From finished steps only.

        optimism: 1: as high as few labels leave room for; 0: as they say; or a share of the way.
        """
        return self.all_survivals([request_id], optimism=optimism)[0][:num_levels]

    def all_survivals(
        self, request_ids: Sequence[str], *, optimism: float = 0.0, most_known: float = 0.0
    ) -> list[list[float]]:
        """`survivals` of all levels, by request.

        most_known: information about another shape. A shape that is known less is hoped for.
        """
        doubt = (1 / (self.information + LEANING) + self._changed) ** 0.5
        of_shape = max(0.0, doubt - min(FIRM_INFORMATION, most_known + LEANING) ** -0.5)
        offsets = [
            max(of_shape, self._hope(request_id, optimism)) + self._offset(request_id)
            for request_id in request_ids
        ]
        if len(offsets) < FEW:
            return [self._survivals(offset) for offset in offsets]
        logits_RL = np.array(offsets)[:, None] + np.array([level.logit for level in self._levels])
        return (1 / (1 + np.exp(-logits_RL))).cumprod(1).tolist()

    def _hope(self, request_id: str, optimism: float) -> float:
        """Logits by which the request may be easier than labels of it, and of others, say."""
        if not optimism:
            return 0.0
        about_all, least, seen = self._about_all, self._differing.information, 0.0
        known = self._offsets.get(request_id)
        if known is not None:
            about_all, least = max(0.0, about_all - known.told), known.least
            seen = known.information - known.least
        variance = 1 / (about_all + LEANING) + OWN_DOUBT / least
        doubt = (1 / variance + seen) ** -0.5
        return max(0.0, optimism * (doubt - FIRM_INFORMATION**-0.5))

    def _survivals(self, offset: float) -> list[float]:
        survival, survivals = 1.0, list[float]()
        for level in self._levels:
            survival /= 1 + math.exp(-level.logit - offset)
            survivals.append(survival)
        return survivals

    def stop_rule(self, request_id: str, num_levels: int) -> StopRule | None:
        """What the drafter judges its next token by; None: margins have taught nothing yet."""
        if self._live[0].num_labels < MIN_LIVE_LABELS:
            return None
        if self._stop_parts is None:
            is_known = [live.num_labels >= MIN_LIVE_LABELS for live in self._live]
            parts = list(zip(is_known, self._live, self._levels, strict=True))
            self._stop_parts = (
                tuple(live.weight if known else 0.0 for known, live, _ in parts),
                tuple(live.bias if known else level.logit for known, live, level in parts),
            )
        weights, biases = self._stop_parts
        offset = self._offset(request_id)
        return StopRule(weights[:num_levels], tuple([offset + b for b in biases[:num_levels]]))

    def observe(self, outcome: DraftOutcome) -> float:
        """Learn from one draft; how much better it fared than predicted, in tokens."""
        if outcome.drafted == 0 and not outcome.margins:
            return 0.0
        self._stop_parts = None
        offset = self._offset_of(outcome.request_id)
        before = [level.logit for level in self._levels]
        excess = variance = 0.0
        labels = [1.0] * outcome.accepted + [0.0] * (outcome.accepted < outcome.drafted)
        for level, live, margin, label in zip(
            self._levels, self._live, _padded(outcome.margins, len(labels)), labels, strict=False
        ):
            offset.compare(label, 1, sigmoid(level.logit))
            error, spread = level.observe(label, offset.value, self.memory)
            excess, variance = excess + error, variance + spread
            if margin is not None:
                live.observe(min(margin, MAX_MARGIN), offset.value, label)
        self._see(offset, variance)
        self.num_labels += bool(labels)
        num_seen = len(labels)
        if outcome.accepted == outcome.drafted < min(len(outcome.margins), len(self._levels)):
            unseen = self._learn_unseen(num_seen, outcome.margins[num_seen], offset.value)
            if unseen is not None:
                # Labels of wide margins alone would lift the request's offset.
                excess, variance, num_seen = excess + unseen[0], variance + unseen[1], num_seen + 1
        self._spread(before, num_seen)
        offset.observe(excess, variance)
        if self._surprise.observe(excess, variance):
            self.doubt(NEWS_INFORMATION)
        return excess

    def observe_fates(self, request_id: str, fates: Sequence[tuple[int, int]]) -> None:
        """Learn from drafts of one request without margins: levels verified, and accepted."""
        self._stop_parts = None
        offset = self._offset_of(request_id)
        for start in range(0, len(fates), BATCH):
            batch = fates[start : start + BATCH]
            before = [level.logit for level in self._levels]
            excess = variance = 0.0
            num_right, num_wrong = [0] * len(before), [0] * len(before)
            for most, done in batch:
                for depth in range(min(done, len(before))):
                    num_right[depth] += 1
                if done < min(most, len(before)):
                    num_wrong[done] += 1
            num_seen = 0
            for level, right, wrong in zip(self._levels, num_right, num_wrong, strict=True):
                if not (count := right + wrong):
                    break
                offset.compare(right, count, sigmoid(level.logit))
                error, spread = level.observe(right / count, offset.value, self.memory, count)
                excess, variance = excess + error, variance + spread
                self.num_labels += 0 if num_seen else count
                num_seen += 1
            self._see(offset, variance)
            self._spread(before, num_seen)
            offset.observe(excess, variance)
            if self._surprise.observe(excess, variance):
                self.doubt(NEWS_INFORMATION)

    def teach(self, request_id: str, num_tokens: int, num_right: int) -> None:
        """Learn about the first level from settled tokens: how many it would have drafted.

        The request's own offset is left alone: they are neighbours, which are alike.
        """
        self._stop_parts = None
        offset = self._offset(request_id)
        before = [level.logit for level in self._levels]
        for _ in range(num_tokens):
            self._levels[0].observe(num_right / num_tokens, offset, self.memory)
        self.num_labels += num_tokens
        self._spread(before, len(before))

    def follow(self, moved: Sequence[float]) -> None:
        """Drafts of another shape moved its levels by so much. It is long ago that this shape was
        seen."""
        self._stop_parts = None
        for level, by in zip(self._levels, moved, strict=False):
            level.follow(by)
            level.information *= OTHER_SHAPE
        self._changed += UNSEEN_CHANGE

    def doubt(self, information: float) -> None:
        """Let what was learned count for little, so that the next labels decide."""
        for level in self._levels:
            level.information = min(level.information, information)
        for offset in self._offsets.values():
            offset.information = min(offset.information, offset.least)
        self._about_all = min(self._about_all, information)

    def forget(self, request_id: str) -> None:
        """The request ended."""
        offset = self._offsets.pop(request_id, None)
        if offset is not None:
            self._differing.observe(offset.excess, offset.variance)

    def knows(self, request_id: str) -> bool:
        """Whether drafts for the request were observed."""
        return request_id in self._offsets

    def _offset_of(self, request_id: str) -> RequestOffset:
        known = self._offsets.get(request_id)
        if known is None:
            known = self._offsets[request_id] = RequestOffset(self._differing.information)
        return known

    def _offset(self, request_id: str) -> float:
        known = self._offsets.get(request_id)
        return known.value if known is not None else 0.0

    def _learn_unseen(self, level: int, margin: float, offset: float) -> tuple[float, float] | None:
        """The live rule ended a draft here: the chance that it saw is the label, if it is known."""
        live = self._live[level]
        if live.num_labels < MIN_LIVE_LABELS:
            return None
        chance = sigmoid(live.weight * min(margin, MAX_MARGIN) + live.bias + offset)
        return self._levels[level].observe(chance, offset, self.memory)

    def _see(self, offset: RequestOffset, variance: float) -> None:
        """Labels of a request came; their errors have this variance in sum."""
        told = offset.least * offset.variance / (offset.least + offset.variance)
        self._about_all = min(self._about_all + told - offset.told, MAX_INFORMATION)
        offset.told = told
        if self._changed:
            self._changed = 1 / (1 / self._changed + TOLD_OF_CHANGE * variance)

    def _spread(self, before: list[float], num_seen: int) -> None:
        """Levels follow the ones above; those that got no label lean more on them."""
        moved = above = 0.0
        for index, level in enumerate(self._levels):
            if moved:
                level.follow(moved)
            if index >= num_seen and index:
                level.fade(above)
            above = level.logit
            moved = above - before[index]


def _padded(margins: tuple[float, ...], count: int) -> list[float | None]:
    return [*margins[:count], *[None] * (count - len(margins))]
