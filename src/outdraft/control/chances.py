"""Chances that the target accepts a draft, by level and request, match length or live confidence.

A draft is accepted at level i, given that all levels above were, with a chance that is estimated
from faded counts. A level with few labels leans on the level above it, the first one on a prior:

    chance[i] = (right[i] + LEAN * above) / (labels[i] + LEAN),  above = chance[i - 1] or prior[0]

For example, 6 labels of which 3 say "accepted", after a level of chance 0.8: (3 + 6 * 0.8) / 12 =
0.65. A request that is easier or harder than others has an offset, in logits. Offers of the host
have a curve for each match length (1, 2-3, 4-7, ... tokens) with priors of its own.

The margin between a level's two largest logits sharpens the chance while a chain is drafted
(`LiveLevel`). It is known before the level's token is drawn, so a length may depend on it. What
such a length leaves out has no label; the chance that the margin gave it stands in for one, else
levels would look better than they are.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outdraft.control.corrections import Costs
from outdraft.control.facts import DraftOutcome, RequestFacts, StepFacts, StepOutcome
from outdraft.control.search import Option
from outdraft.core.decision import LiveStop, Shape
from outdraft.core.draft import MAX_DRAFTS, MAX_MARGIN, DraftSource

FORGETTING = 0.95  # of the past, per step with labels
LIMIT = 3.5  # standard deviations
MIN_VARIANCE = 1.5  # labels that say too little to judge by


class ChangeDetector:
    """A running sum of label minus chance, and its variance if the chances are right."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._variance = 0.0

    def observe(self, excess: float, variance: float) -> bool:
        """Add a step's labels; true if earlier labels should count less.

        excess: the sum of labels minus their chances. variance: the sum of chance * (1 - chance).
        """
        self._sum = FORGETTING * self._sum + excess
        self._variance = FORGETTING**2 * self._variance + variance
        is_change = self._variance > MIN_VARIANCE and abs(self._sum) > LIMIT * math.sqrt(
            self._variance
        )
        if is_change:
            self._sum = self._variance = 0.0
        return is_change


KEEP = 0.997  # of the labels, for each step that brings new ones: 333 steps count
LEAN = 6.0  # labels that the level above counts as
PRIOR = 0.6  # chance of a network's first level before anything was seen
# Chance of a host's first token, by match length: 1, 2-3, 4-7, ... tokens. A token that is
# accepted makes the match longer for the next one.
HOST_PRIORS = 0.25, 0.5, 0.65, 0.75, 0.8, 0.85, 0.9
PREDICTION_PRIOR = 0.75  # where the client predicts the text, for any match length
NEWS_LABELS = 4.0  # labels that still count after a change
MIN_CHANCE, MAX_CHANCE = 0.005, 0.995
MIN_SURVIVAL = 0.01  # deeper levels are left out
OFFSETS, OFFSETS_WEIGHT = 0.3, 400.0  # deviation of requests' offsets before any ended, in logits,
OFFSETS_KEEP = 0.97  # and its weight, as of 4 requests with 40 labels; kept for each that ends
MIN_OFFSETS, MAX_OFFSETS = 0.2, 1.2
MAX_OFFSET_INFORMATION = 50.0  # about 250 labels; older ones fade
MAX_OFFSET = 4.0  # logits
UNSEEN_CHANGE = 1 / 500  # variance of a logit's change in a step that drafts another shape
SURE_INFORMATION = 12.0  # about a logit, from which there is no hope for better; 50 labels
HORIZON = 128  # tokens over which catching up is paid at least
LIVE_LABELS = 50  # of a level before its margins say anything
LIVE_INFORMATION = 100.0  # of a live level; about 500 labels
MAX_WEIGHT, MAX_BIAS = 6.0, 12.0  # of a live level, in logits

CurveKey = tuple[str, str, Shape]  # network, rule, shape


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def logit(chance: float) -> float:
    return math.log(chance / (1 - chance))


@dataclass(slots=True)
class LiveLevel:
    """A logistic regression of one level's label on its margin, by Newton steps.

    It says how much the margin changes the usual chance: sigmoid(usual + weight * margin + bias),
    with the logit of the level and the request for `usual`.

    information: [[a, b], [b, c]] of (weight, bias); it begins as a ridge.
    """

    weight: float = 0.0
    bias: float = 0.0
    a: float = 1.0
    b: float = 0.0
    c: float = 1.0
    num_labels: int = 0

    def chance(self, margin: float, usual: float) -> float:
        return sigmoid(self.weight * margin + self.bias + usual)

    def observe(self, margin: float, usual: float, label: float) -> None:
        chance = self.chance(margin, usual)
        variance = max(chance * (1 - chance), 1e-3)
        keep = 1 - variance / LIVE_INFORMATION
        self.a = keep * self.a + variance * margin * margin
        self.b = keep * self.b + variance * margin
        self.c = keep * self.c + variance
        scale = (label - chance) / max(self.a * self.c - self.b * self.b, 1e-9)
        self.weight += scale * (self.c * margin - self.b)
        self.bias += scale * (self.a - self.b * margin)
        self.bias = max(-MAX_BIAS, min(MAX_BIAS, self.bias))
        self.weight = max(0.0, min(MAX_WEIGHT, self.weight))  # a wide margin is no bad sign
        self.num_labels += 1


@dataclass(slots=True)
class Offset:
    """Ease of drafting for a request, in logits; above 0: easier than for others.

    Attributes:
        information: begins as that of "no offset".
        excess, variance: sums of its labels minus their usual chances, and of their variances.
    """

    information: float
    value: float = 0.0
    excess: float = 0.0
    variance: float = 0.0

    def observe(self, excess: float, variance: float) -> None:
        """excess: labels minus their chances, in sum; variance: of these labels."""
        self.information = min(self.information + variance, MAX_OFFSET_INFORMATION)
        self.value += excess / self.information
        self.value = max(-MAX_OFFSET, min(MAX_OFFSET, self.value))


class Curve:
    """Acceptance of the drafts of one source, under one rule, in one shape or of one match length.

    Requests differ: the variance of their offsets is estimated by the method of moments
    (DerSimonian and Laird 1986). A request whose labels have the variance V in sum has e more right
    labels than expected. On average e * e is V + V * V * the variance of offsets.

    Attributes:
        num_steps: with labels.
    """

    def __init__(self, prior: float, num_levels: int) -> None:
        self.num_steps = 0
        self._prior = prior
        self._labels = [0.0] * num_levels
        self._right = [0.0] * num_levels
        self._live = [LiveLevel() for _ in range(num_levels)]
        self._offsets: dict[str, Offset] = {}
        self._squares, self._weights = OFFSETS**2 * OFFSETS_WEIGHT, OFFSETS_WEIGHT
        self._change = ChangeDetector()
        self._chances: list[float] | None = None  # None: new labels came. Derived from it:
        self._logits: list[float] = []
        self._usual: list[float] = []  # survivals of a request without an offset
        self._unseen = 0.0  # variance of what its logits may have changed by meanwhile

    @property
    def chances(self) -> list[float]:
        """By level, for a request without labels."""
        if self._chances is None:
            self._chances, above = [], self._prior
            for labels, right in zip(self._labels, self._right, strict=True):
                above = (right + LEAN * above) / (labels + LEAN)
                above = max(MIN_CHANCE, min(MAX_CHANCE, above))
                self._chances.append(above)
            self._logits = [logit(one) for one in self._chances]
            self._usual = _survivals(self._logits, 0.0)
        return self._chances

    @property
    def _information(self) -> float:
        """About the first level's logit."""
        first = self.chances[0]
        return first * (1 - first) * (self._labels[0] + LEAN)

    @property
    def _no_offset(self) -> float:
        """Weight of "no offset", as an information: 1 is that of about 5 labels."""
        variance = self._squares / self._weights
        return 1 / max(MIN_OFFSETS**2, min(MAX_OFFSETS**2, variance))

    @property
    def doubt(self) -> float:
        """Standard deviation of the first level's logit that is worth a hope; 0: it is known."""
        return max(0.0, (1 / self._information + self._unseen) ** 0.5 - SURE_INFORMATION**-0.5)

    def survivals(self, request_id: str, num_levels: int, hope: float = 0.0) -> list[float]:
        """By level, the chance that a draft is accepted so far; not of hopeless ones.

        hope: logits by which chances may be better than labels say.
        """
        _, offset = self.chances, self._offset(request_id) + hope
        if not offset:
            return self._usual[:num_levels]
        return _survivals(self._logits[:num_levels], offset)

    @property
    def knows_margins(self) -> bool:
        """Margins have enough labels to say something about the first level."""
        return self._live[0].num_labels >= LIVE_LABELS

    def live_stop(self, request_id: str, num_levels: int, price: float, row_cap: int) -> LiveStop:
        """The live rule of a request's chain."""
        _, offset = self.chances, self._offset(request_id)
        weights, biases = list[float](), list[float]()
        for live, usual in zip(self._live[:num_levels], self._logits, strict=False):
            is_known = live.num_labels >= LIVE_LABELS
            weights.append(live.weight if is_known else 0.0)
            biases.append(offset + (usual + live.bias if is_known else usual))
        return LiveStop(tuple(weights), tuple(biases), price, row_cap)

    def observe(self, drafts: Iterable[DraftOutcome], *, has_offsets: bool = True) -> float:
        """Learn from a step's drafts; return the accepted tokens beyond the predicted ones."""
        if self._unseen:  # earlier labels say less about it now
            keep = 1 / (1 + self._unseen * self._information)
            self._labels = [keep * one for one in self._labels]
            self._right = [keep * one for one in self._right]
            self._unseen, self._chances = 0.0, None
        chances, total, spread = self.chances, 0.0, 0.0
        labels, right = [0.0] * len(chances), [0.0] * len(chances)
        for draft in drafts:
            offset = self._offsets.get(draft.request_id) or Offset(self._no_offset)
            excess = variance = 0.0
            for level, label in self._labels_of(draft, offset.value):
                chance = usual = chances[level]
                offset.excess += label - usual
                offset.variance += usual * (1 - usual)
                if offset.value:
                    chance = sigmoid(self._logits[level] + offset.value)
                excess, variance = excess + label - chance, variance + chance * (1 - chance)
                labels[level] += 1
                # Easy requests alone reach deep levels: these would look better than they are.
                right[level] += label - (chance - usual)
            if variance and has_offsets:
                offset.observe(excess, variance)
                self._offsets[draft.request_id] = offset
            total, spread = total + excess, spread + variance
        if spread:
            self._count(labels, right)
            if self._change.observe(total, spread):
                self.doubt_all(NEWS_LABELS)
        return total

    def miss(self) -> None:
        """A step drafted another shape: this one may have changed."""
        self._unseen += UNSEEN_CHANGE

    def doubt_all(self, num_labels: float) -> None:
        """Let at most num_labels labels of each level count, so that the next ones decide."""
        for level, labels in enumerate(self._labels):
            if labels > num_labels:
                self._right[level] *= num_labels / labels
                self._labels[level] = num_labels
        self._chances = None

    def expect(self, prior: float) -> None:
        """Change the prior chance that the first level leans on."""
        self._prior, self._chances = prior, None

    def forget(self, request_id: str) -> None:
        """Drop a request that ended; its effect on the spread stays."""
        if (ended := self._offsets.pop(request_id, None)) is not None:
            own = ended.excess * ended.excess - ended.variance
            self._squares = OFFSETS_KEEP * self._squares + own
            self._weights = OFFSETS_KEEP * self._weights + ended.variance * ended.variance

    def _offset(self, request_id: str) -> float:
        known = self._offsets.get(request_id)
        return known.value if known is not None else 0.0

    def _labels_of(self, draft: DraftOutcome, offset: float) -> list[tuple[int, float]]:
        """Levels with their labels; one that the live rule left out has its chance for a label."""
        found = [(level, 1.0) for level in range(min(draft.accepted, len(self._live)))]
        if draft.accepted < min(draft.drafted, len(self._live)):
            found.append((draft.accepted, 0.0))
        for (level, label), margin in zip(found, draft.margins, strict=False):
            usual = self._logits[level] + offset
            self._live[level].observe(min(margin, MAX_MARGIN), usual, label)
        end = draft.drafted
        if draft.accepted == end < min(len(draft.margins), len(self._live)):
            live = self._live[end]
            if live.num_labels >= LIVE_LABELS:
                usual = self._logits[end] + offset
                found.append((end, live.chance(min(draft.margins[end], MAX_MARGIN), usual)))
        return found

    def _count(self, labels: Sequence[float], right: Sequence[float]) -> None:
        self.num_steps += 1
        # Levels that no draft reached fade as well: they lean more on the one above, and are tried.
        self._labels = [KEEP * old + new for old, new in zip(self._labels, labels, strict=True)]
        self._right = [KEEP * old + new for old, new in zip(self._right, right, strict=True)]
        self._chances = None


class HostCurves:
    """Acceptance of one source's offers: a curve for each match length.

    What a curve leans on is its prior times how much better or worse than all priors the source's
    first tokens have been.
    """

    def __init__(self, *, is_given: bool = False) -> None:
        """is_given: the source is a text that the client predicts."""
        self._priors = (PREDICTION_PRIOR,) if is_given else HOST_PRIORS
        self._curves = [Curve(prior, MAX_DRAFTS) for prior in self._priors]
        self._expected, self._right = 0.0, 0.0  # first tokens, faded: by the priors, and in fact
        self._change = ChangeDetector()

    def curve(self, match_length: int) -> Curve:
        return self._curves[self._bucket(match_length)]

    def observe(self, match_length: int, drafted: int, accepted: int) -> None:
        """Learn how many of an offer's `drafted` tokens were right."""
        if not drafted:
            return
        bucket = self._bucket(match_length)
        chance = self._curves[bucket].chances[0]
        self._curves[bucket].observe([DraftOutcome("", drafted, accepted)], has_offsets=False)
        self._expected = KEEP * self._expected + self._priors[bucket]
        self._right = KEEP * self._right + (accepted > 0)
        if self._change.observe((accepted > 0) - chance, chance * (1 - chance)):
            keep = min(1.0, NEWS_LABELS / self._expected)
            self._expected, self._right = keep * self._expected, keep * self._right
            for curve in self._curves:
                curve.doubt_all(NEWS_LABELS)
        times = (self._right + LEAN) / (self._expected + LEAN)
        for prior, curve in zip(self._priors, self._curves, strict=True):
            curve.expect(min(MAX_CHANCE, times * prior))

    def _bucket(self, match_length: int) -> int:
        return min(max(1, match_length).bit_length() - 1, len(self._priors) - 1)


class Chances:
    """Owns the acceptance curves; makes options of the requests' offers.

    max_levels: most levels of any draft.
    """

    def __init__(self, max_levels: int) -> None:
        self._max_levels = max_levels
        self._networks: dict[CurveKey, Curve] = {}
        self._hosts: dict[str, HostCurves] = {}

    def network(self, source: str, rule: str, shape: Shape) -> Curve:
        key = source, rule, shape
        if key not in self._networks:
            self._networks[key] = Curve(PRIOR, len(shape) or self._max_levels)
        return self._networks[key]

    def host(self, source: str) -> HostCurves:
        if source not in self._hosts:
            self._hosts[source] = HostCurves(is_given=source == DraftSource.PREDICTION)
        return self._hosts[source]

    def options(self, request: RequestFacts, costs: Costs, hope: float) -> list[Option]:
        """All ways in which a request could draft now. hope: share of the doubt."""
        if request.max_drafts == 0:
            return []
        options = list[Option]()
        for offer in request.offers:
            curve = self.host(offer.source).curve(offer.match_length)
            survivals = curve.survivals("", offer.length)
            options.append(
                Option(offer.source, survivals, offer.shape, match_length=offer.match_length)
            )
        if request.network is not None:
            options += self._of_network(request, costs, hope)
        return [one for one in options if one.survivals]

    def _of_network(self, request: RequestFacts, costs: Costs, hope: float) -> list[Option]:
        source, options = request.network or "", list[Option]()
        curves = [self.network(source, request.rule, shape) for shape in request.shapes]
        doubts = [curve.doubt for curve in curves]
        for shape, curve, doubt in zip(request.shapes, curves, doubts, strict=True):
            # A shape that is known less than another is hoped for: else it would never be tried.
            hoped = max(hope * doubt, doubt - min(doubts))
            survivals = curve.survivals(request.request_id, request.most_levels(shape), hoped)
            fixed_s = 0.0
            if request.unread_tokens and survivals:
                # Future steps share this cost: as many are expected as there were so far.
                tokens = min(request.max_tokens, max(HORIZON, 2 * request.unread_tokens))
                steps = max(1.0, tokens / (1 + sum(survivals)))
                fixed_s = costs.catch_up_s(source, request.unread_tokens) / steps
            options.append(Option(source, survivals, shape, is_network=True, fixed_s=fixed_s))
        return options

    def are_doubted(self, facts: StepFacts) -> bool:
        """A network has few labels, so its chances may be better than they say."""
        keys = {
            (one.network, one.rule, shape)
            for one in facts.requests
            if one.network is not None
            for shape in one.shapes
        }
        return any(self.network(*key).doubt > 0 for key in keys)

    def observe(self, outcome: StepOutcome) -> float:
        """Learn from a step; return the tokens that networks brought beyond the predicted ones."""
        grants = {grant.request_id: grant for grant in outcome.decision.grants}
        networks = {request.network for request in outcome.facts.requests}
        drafts: dict[CurveKey, list[DraftOutcome]] = {}
        for draft in outcome.drafts:
            grant = grants[draft.request_id]
            if grant.source in networks:
                drafts.setdefault((grant.source, grant.rule, grant.shape), []).append(draft)
            else:
                self.host(grant.source).observe(grant.match_length, draft.drafted, draft.accepted)
        excess = 0.0
        for key, own in drafts.items():
            excess += self.network(*key).observe(own)
            for other, curve in self._networks.items():
                if other[:2] == key[:2] and other != key:
                    curve.miss()
        for shadow in outcome.shadows:
            self.host(shadow.source).observe(shadow.match_length, shadow.drafted, shadow.accepted)
        return excess

    def has_drafted(self, request: RequestFacts) -> bool:
        """The request's network has labels."""
        return any(
            self.network(request.network or "", request.rule, shape).num_steps
            for shape in request.shapes
        )

    def forget(self, request_id: str) -> None:
        for curve in self._networks.values():
            curve.forget(request_id)


def _survivals(logits: Iterable[float], offset: float) -> list[float]:
    survival, found = 1.0, list[float]()
    for one in logits:
        survival /= 1 + math.exp(-one - offset)
        if survival < MIN_SURVIVAL:
            break
        found.append(survival)
    return found
