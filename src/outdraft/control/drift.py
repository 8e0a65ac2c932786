"""Costs as they are now: a measured table, corrected by what steps really take.

One correction is shared by all numbers of rows, and one belongs to each, much like those of its
neighbours. The shared one carries what is learned while speculating over to plain steps, which are
seldom seen meanwhile, and what plain steps tell over to networks that are off; the own ones tell a
machine that slowed down from a table that is wrong in one place. A sudden change is taken for both
by halves: plain decoding that looks too fast is tried and put right at once, while it would be put
right by rare probes only if it looked too slow.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from outdraft.control.costs import CostTable, DrafterCost
from outdraft.control.facts import Decision, Grant, Reason, StepFacts, StepOutcome

NOISE = 0.05**2  # variances of logarithms: of one measured time,
SHARED, OWN = 0.2**2, 0.05**2  # of the corrections before anything was seen,
WALK = 0.004**2  # and of the change of either from step to step
LONE, LONE_NOISE = 0.5**2, 0.15**2  # of what a lone step takes more, and of its measured time
LEAST = 0.1  # times what a table says, of catching up
NEAR = 0.8  # correlation of neighbours' own corrections
SURPRISE = 0.25  # most that counts of one step: it may be an outlier
SUDDEN = 50  # steps' walk at once if a second one to the same side follows: it is a change
CLIP = math.log(4)  # of a correction, either way
HOST_CLIP = math.log(32)  # of the host's, which tables know less about
FAR, LONG = math.log(1.5), 2000  # a correction, and for how many times in a row: a wrong table
SPAN = 4096  # rows whose times are kept at hand


class Surprises:
    """Tells outliers from a change: how many of them came in a row, to the same side."""

    def __init__(self) -> None:
        self._in_a_row = 0  # negative: the times were shorter than expected

    def steps(self, surprise: float) -> int:
        """How many steps' walk the next one counts as; `surprise`: of a logarithm."""
        if abs(surprise) <= SURPRISE:
            self._in_a_row = 0
        elif surprise > 0:
            self._in_a_row = max(0, self._in_a_row) + 1
        else:
            self._in_a_row = min(0, self._in_a_row) - 1
        return SUDDEN if abs(self._in_a_row) > 1 else 1


def cut(surprise: float) -> float:
    """What counts of it."""
    return max(-SURPRISE, min(SURPRISE, surprise))


class Correction:
    """Factors on a table's times by bucket: a Kalman filter. N: buckets, and what they share.

    Without covariances, lengths that were not tried lately would look as dear as they did then.
    """

    def __init__(self, num_buckets: int, clip: float = CLIP) -> None:
        """`clip`: the largest correction, either way, as a logarithm."""
        self._clip = clip
        self.num_far = 0  # times in a row that the correction was beyond FAR
        self._surprises = Surprises()
        self._factors: list[float] | None = None  # until the next time is observed
        bucket_N = np.arange(num_buckets + 1)
        near_NN = NEAR ** np.abs(bucket_N[:, None] - bucket_N)
        near_NN[-1] = near_NN[:, -1] = 0  # what all share has no own correction
        self._log_N = np.zeros(num_buckets + 1)
        self._variance_NN = SHARED + OWN * near_NN
        self._walk_NN = WALK * (1 + near_NN)

    @property
    def factors(self) -> list[float]:
        """By bucket."""
        if self._factors is None:
            logs_N, clip = self._log_N[:-1].tolist(), self._clip
            self._factors = [math.exp(max(-clip, min(clip, log))) for log in logs_N]
        return self._factors

    def factor(self, bucket: int) -> float:
        return self.factors[bucket]

    @property
    def shared_log(self) -> float:
        """The logarithm of what all buckets share: how much slower the machine is."""
        return max(-self._clip, min(self._clip, float(self._log_N[-1])))

    def observe(self, bucket: int, table_s: float, actual_s: float) -> None:
        """Learn what a pass of this bucket took, and what the table says that it takes."""
        if table_s <= 0 or actual_s <= 0:
            return
        surprise = math.log(actual_s / table_s) - float(self._log_N[bucket])
        self._variance_NN += self._walk_NN * self._surprises.steps(surprise)
        self._factors = None
        own_N = self._variance_NN[bucket].copy()
        gain_N = own_N * (1 / (float(own_N[bucket]) + NOISE))
        self._log_N += cut(surprise) * gain_N
        self._variance_NN -= gain_N[:, None] * own_N
        is_far = abs(float(self._log_N[bucket])) > FAR
        self.num_far = self.num_far + 1 if is_far else 0


class LoneCorrection:
    """As Correction, of a table with one bucket: numbers, which take a tenth of arrays' time."""

    def __init__(self, clip: float = CLIP) -> None:
        self._clip = clip
        self.num_far = 0
        self._surprises = Surprises()
        self._log = 0.0
        self._variance = SHARED + OWN

    @property
    def factor(self) -> float:
        return math.exp(max(-self._clip, min(self._clip, self._log)))

    def observe(self, table_s: float, actual_s: float) -> None:
        """As Correction."""
        if table_s <= 0 or actual_s <= 0:
            return
        surprise = math.log(actual_s / table_s) - self._log
        own = self._variance + 2 * WALK * self._surprises.steps(surprise)
        gain = own * (1 / (own + NOISE))
        self._log += cut(surprise) * gain
        self._variance = own - gain * own
        self.num_far = self.num_far + 1 if abs(self._log) > FAR else 0


class NetworkCorrection:
    """Factors on a network's times: among steps that go on drafting, in lone ones, of catching up.

    A probe stands alone among plain steps and finds the caches full of other things. It takes up to
    twice as long as the same step among others that draft, and would say that the network became
    slow. So how much longer lone steps take is learned as well (a Kalman filter of two numbers):
    what then changes from one to the next has changed for all steps.

    All of it comes on top of what the target's passes say of the machine. A network that is off
    would else look as slow as the machine was when it drafted last.
    """

    def __init__(self, target: Correction) -> None:
        self._target = target
        self.num_far = 0  # as Correction
        self._log, self._log_lone = 0.0, 0.0
        self._variance, self._covariance, self._variance_lone = SHARED + OWN, 0.0, LONE
        self._surprises = Surprises()
        self._catch_up = LoneCorrection()

    @property
    def factor(self) -> float:
        """For a step among others that draft."""
        return math.exp(max(-CLIP, min(CLIP, self._log + self._target.shared_log)))

    @property
    def catch_up_factor(self) -> float:
        return self._catch_up.factor * math.exp(self._target.shared_log)

    def observe(
        self, table_s: float, catch_up_s: float, actual_s: float, *, is_lone: bool = False
    ) -> None:
        """Learn from a step's drafts.

        table_s, catch_up_s: what the table says of its passes, and of catching up; if any was to be
        done, the step says how long that took. is_lone: it is a probe's step, or one like it.
        """
        if table_s <= 0 or actual_s <= 0:
            return
        machine = math.exp(self._target.shared_log)
        table_s, catch_up_s = table_s * machine, catch_up_s * machine
        expected = self._log + (self._log_lone if is_lone else 0.0)
        if catch_up_s > 0:
            passes_s = table_s * math.exp(max(-CLIP, min(CLIP, expected)))
            self._catch_up.observe(catch_up_s, max(actual_s - passes_s, LEAST * catch_up_s))
            return
        surprise = math.log(actual_s / table_s) - expected
        self._variance += 2 * WALK * (1 if is_lone else self._surprises.steps(surprise))
        own, lone, noise = self._variance, self._covariance, NOISE
        if is_lone:
            own, lone = own + self._covariance, lone + self._variance_lone
            noise = LONE_NOISE
        spread = own + (lone if is_lone else 0.0) + noise
        self._log += cut(surprise) * own / spread
        self._log_lone += cut(surprise) * lone / spread
        self._variance -= own * own / spread
        self._covariance -= own * lone / spread
        self._variance_lone -= lone * lone / spread
        self.num_far = self.num_far + 1 if abs(self._log) > FAR else 0


class Costs:
    """Predicts times of steps; owns what was learned about a table's errors."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        rows = np.arange(SPAN)
        self._target_N: list[float] = table.target.at(rows).tolist()
        self._bucket_N = [table.target.bucket(count) for count in range(SPAN)]
        self._target = Correction(len(table.target.rows))
        self._pass_N = {name: one.passes.at(rows).tolist() for name, one in table.drafters.items()}
        self._catch_up_N = {
            name: one.catch_up.at(rows).tolist() for name, one in table.drafters.items()
        }
        self._drafters = {name: NetworkCorrection(self._target) for name in table.drafters}
        self._host, self._drafting_host = LoneCorrection(HOST_CLIP), LoneCorrection(HOST_CLIP)

    def target_s(self, num_rows: int, context_tokens: int, num_requests: int = 1) -> float:
        """A pass of the target."""
        seconds = self._table_s(num_rows, context_tokens, num_requests)
        return seconds * self._target.factor(self.table.target.bucket(num_rows))

    def target_N(
        self, first: int, count: int, context_tokens: int, num_requests: int = 1
    ) -> list[float]:
        """Passes of first, first + 1, ... rows, `count` of them."""
        if first + count <= SPAN:
            span = slice(first, first + count)
            times_N, bucket_N = self._target_N[span], self._bucket_N[span]
        else:
            rows = range(first, first + count)
            times_N = self.table.target.at(np.asarray(rows)).tolist()
            bucket_N = [self.table.target.bucket(num_rows) for num_rows in rows]
        beside_s, factors = self._beside_s(context_tokens, num_requests), self._target.factors
        return [
            (seconds + beside_s) * factors[bucket]
            for seconds, bucket in zip(times_N, bucket_N, strict=True)
        ]

    def pass_N(self, network: str, count: int, context_tokens: int) -> list[float]:
        """Passes of a network with 0, 1, ... rows, `count` of them; none takes no time."""
        cost = self.drafter(network)
        times_N = self._pass_N[network][:count]
        if count > SPAN:
            times_N = cost.passes.at(np.arange(count)).tolist()
        beside_s, factor = cost.context_s * context_tokens, self._drafters[network].factor
        return [0.0, *[(seconds + beside_s) * factor for seconds in times_N[1:]]]

    def start_s(self, network: str, lengths: Iterable[int] = ()) -> float:
        """What a network's drafts of a step, for texts of these lengths, take beside its passes."""
        return self.drafter(network).step_s(lengths) * self._drafters[network].factor

    def beside_s(self, network: str) -> float:
        """How much longer the target's pass takes in a step in which the network drafts.

        It follows the network's other times: were it left as the table has it, a machine that has
        become faster or slower would seem to have done so for the target's pass alone, and plain
        decoding would be expected to change more than it does.
        """
        return self.drafter(network).beside_s * self._drafters[network].factor

    def catch_up_s(self, network: str, num_tokens: int) -> float:
        """Reading so many tokens, beside those of a usual step."""
        seconds = self._table_catch_up_s(network, num_tokens)
        return seconds * self._drafters[network].catch_up_factor

    def host_s(self, num_requests: int) -> float:
        """The host's part of a plain step."""
        return self.table.booking_s(num_requests, drafts=False) * self._host.factor

    def drafting_s(self, num_requests: int) -> float:
        """What the host takes beyond that in a step in which anybody drafts."""
        drafting_s = self.table.booking_s(num_requests, drafts=True)
        drafting_s *= self._drafting_host.factor
        return max(0.0, drafting_s - self.host_s(num_requests))

    @property
    def are_wrong(self) -> bool:
        """Whether passes have long taken much more, or less, than the table says."""
        corrections = (self._target, *self._drafters.values())
        return any(correction.num_far >= LONG for correction in corrections)

    def drafter(self, network: str) -> DrafterCost:
        return self.table.drafters[network]

    def observe(self, outcome: StepOutcome, *, is_lone: bool = False) -> None:
        """Learn from a step what its parts take.

        A probe tells what the network takes, and nothing else: all of it is slower than among other
        steps that draft. What a network takes in a step with a prompt is hidden by the prompt. A
        held lesson takes longer than the steps beside it, which `observe_passing` is told of.

        is_lone: the network finds the caches as a probe does, since deciding takes long.
        """
        facts = outcome.facts
        lengths = [request.context_tokens for request in facts.requests]
        is_probe = outcome.decision.reason is Reason.NETWORK_PROBE
        is_passing = outcome.is_held and bool(outcome.drafts)
        if not is_probe and not is_passing:
            self.observe_host(len(lengths), outcome.host_s, drafts=bool(outcome.drafts))
        network, pass_rows, lag = self._read(outcome)
        beside_s = self.beside_s(network) if network else 0.0
        if not is_probe:  # first: what it tells of the machine is no news of the network
            target_s = outcome.target_s - beside_s
            self.observe_target(outcome.num_rows, sum(lengths), target_s, len(lengths))
        if not network or facts.prompt_rows or (is_passing and not _has_rule(outcome.decision)):
            return
        self.observe_drafter(
            network, pass_rows, lag, lengths, outcome.draft_s, is_lone=is_lone or is_probe
        )

    def observe_passing(
        self, facts: StepFacts, decision: Decision, draft_s: float, target_s: float
    ) -> None:
        """Learn from a step, neither decided nor a lesson, that a decision to draft holds for.

        If chains are ended live, nobody counted their rows: lessons alone tell.
        """
        if facts.prompt_rows or _has_rule(decision):
            return
        network, num_rows, pass_rows = "", len(facts.requests), list[int]()
        for grant in decision.grants:
            network, num_rows = grant.source, num_rows + grant.rows
            _add_passes(pass_rows, grant, min(self.drafter(network).max_passes, grant.levels))
        lengths = [request.context_tokens for request in facts.requests]
        target_s -= self.beside_s(network)
        self.observe_target(num_rows, sum(lengths), target_s, len(lengths))
        self.observe_drafter(network, pass_rows, 0, lengths, draft_s)

    def _read(self, outcome: StepOutcome) -> tuple[str, list[int], int]:
        """Which network drafted ("": none did), rows of each of its passes, and tokens that it read
        to catch up."""
        requests = {request.request_id: request for request in outcome.facts.requests}
        grants = {grant.request_id: grant for grant in outcome.decision.grants}
        network, pass_rows, lag = "", list[int](), 0
        for draft in outcome.drafts:
            grant, request = grants[draft.request_id], requests[draft.request_id]
            if grant.source != request.network:
                continue
            network = grant.source
            if not outcome.is_held:  # the first step behind the decision caught up
                lag += request.lag_tokens
            passes = min(self.drafter(network).max_passes, draft.num_passes)
            _add_passes(pass_rows, grant, passes)
        return network, pass_rows, lag

    def observe_target(
        self, num_rows: int, context_tokens: int, actual_s: float, num_requests: int = 1
    ) -> None:
        table_s = self._table_s(num_rows, context_tokens, num_requests)
        self._target.observe(self.table.target.bucket(num_rows), table_s, actual_s)

    def observe_drafter(
        self,
        network: str,
        pass_rows: Sequence[int],
        catch_up_tokens: int,
        lengths: Sequence[int],
        actual_s: float,
        *,
        is_lone: bool = False,
    ) -> None:
        """`pass_rows`: rows of each pass of a step's drafts; `lengths`: of the texts."""
        cost, times_N = self.drafter(network), self._pass_N[network]
        table_s = cost.step_s(lengths) + sum(times_N[min(rows, SPAN - 1)] for rows in pass_rows)
        table_s += len(pass_rows) * cost.context_s * cost.num_read(lengths)
        catch_up_s = self._table_catch_up_s(network, catch_up_tokens) if catch_up_tokens else 0.0
        self._drafters[network].observe(table_s, catch_up_s, actual_s, is_lone=is_lone)

    def observe_host(self, num_requests: int, actual_s: float, *, drafts: bool) -> None:
        """`drafts`: somebody drafted in that step."""
        correction = self._drafting_host if drafts else self._host
        correction.observe(self.table.booking_s(num_requests, drafts=drafts), actual_s)

    def _table_catch_up_s(self, network: str, num_tokens: int) -> float:
        if num_tokens < SPAN:
            return self._catch_up_N[network][num_tokens]
        return float(self.drafter(network).catch_up.at(np.array(num_tokens)))

    def _table_s(self, num_rows: int, context_tokens: int, num_requests: int) -> float:
        if num_rows < SPAN:
            seconds = self._target_N[num_rows]
        else:
            seconds = float(self.table.target.at(np.array(num_rows)))
        return seconds + self._beside_s(context_tokens, num_requests)

    def _beside_s(self, context_tokens: int, num_requests: int) -> float:
        table = self.table
        return table.context_s * context_tokens + table.request_s * max(0, num_requests - 1)


def _has_rule(decision: Decision) -> bool:
    """Whether a chain may be ended live."""
    return any(grant.stop is not None for grant in decision.grants)


def _add_passes(pass_rows: list[int], grant: Grant, num_passes: int) -> None:
    """Add the rows that a draft has in so many passes."""
    pass_rows += [0] * (num_passes - len(pass_rows))
    for level in range(num_passes):
        pass_rows[level] += grant.shape[level - 1] if grant.shape and level else 1
