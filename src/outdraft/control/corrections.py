"""Costs as they are now: a measured table times factors that steps correct.

A factor is what steps take, divided by what the table says. There is one for the target's passes,
which stands for the machine and is shared by all phases on the device; one for each network beside
it; and one for the host, in steps with drafts and without. A step moves the factor's logarithm by
1/12 of its surprise, cut at 0.25, as it may be an outlier. A second large surprise in a row to the
same side is a change, and moves it by 40 %.

Each number of rows in the target's table has a factor of its own besides, in case the table is
wrong in one place. It moves as the shared one does. So half of what is learned while drafting is
carried over to plain steps: these look rather too fast than too slow, are tried, and put right.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from outdraft.control.costs import CostTable
from outdraft.control.facts import StepOutcome
from outdraft.core.decision import Reason

GAIN = 1 / 12  # share of a surprise that moves a factor
MAX_LOG_STEP = 0.25  # most change of a factor's logarithm in one step
CHANGE_GAIN = 0.4  # the share if it is the second surprise in a row
OWN_GAIN = 1 / 12  # share of a surprise that moves the factor of its number of rows alone
NEIGHBOUR_SHARE = 0.7  # of that, for the next number of rows
MAX_LOG = math.log(64)  # of a factor, either way
WRONG_LOG, WRONG_STEPS = math.log(1.5), 2000  # a factor, and steps in a row: a wrong table


class Factor:
    """Ratio of an actual time to the table's."""

    def __init__(self) -> None:
        self.num_wrong = 0  # times in a row that it was beyond WRONG_LOG
        self._log = 0.0
        self._num = 0
        self._large = 0  # surprises in a row, negative: steps were shorter than expected

    @property
    def value(self) -> float:
        return math.exp(self._log)

    def observe(self, table_s: float, actual_s: float) -> float:
        """Learn from a time and the table's. Return the part of the surprise that counts."""
        if table_s <= 0 or actual_s <= 0:
            return 0.0
        self._num += 1
        surprise = math.log(actual_s / table_s) - self._log
        if abs(surprise) <= MAX_LOG_STEP:
            self._large = 0
        else:
            self._large = max(1, self._large + 1) if surprise > 0 else min(-1, self._large - 1)
        cut = max(-MAX_LOG_STEP, min(MAX_LOG_STEP, surprise))
        is_change = abs(self._large) > 1
        self._log += CHANGE_GAIN * surprise if is_change else max(GAIN, 1 / (1 + self._num)) * cut
        self._log = max(-MAX_LOG, min(MAX_LOG, self._log))
        self.num_wrong = self.num_wrong + 1 if abs(self._log) > WRONG_LOG else 0
        return surprise if is_change else cut


class Costs:
    """Predicts times of steps, in seconds; owns the learned errors of a table."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._own = np.zeros(len(table.target.rows))  # logarithms, by point of the table
        self._own_factors = np.exp(self._own)
        self._num_own = [0] * len(self._own)
        self._machine, self._host, self._drafting_host = Factor(), Factor(), Factor()
        self._networks = {name: Factor() for name in table.drafters}

    @property
    def are_wrong(self) -> bool:
        """Passes have taken much more, or less, than the table says for WRONG_STEPS steps."""
        return any(
            one.num_wrong >= WRONG_STEPS for one in (self._machine, *self._networks.values())
        )

    def target_N(self, first: int, count: int, context: int, num_requests: int) -> list[float]:
        """Passes of the target of first, first + 1, ... rows, `count` of them."""
        target, rows_N = self.table.target, np.arange(first, first + count)
        times_N = target.at(rows_N) + self._beside_s(context, num_requests)
        factors = self._machine.value * self._own_factors
        return (times_N * factors[target.points(rows_N)]).tolist()

    def pass_N(self, network: str, count: int, lengths: Sequence[int]) -> list[float]:
        """Passes of a network with 0, 1, ... rows, `count` of them, for texts of these lengths."""
        cost, factor = self.table.drafters[network], self._network(network)
        times_N: list[float] = cost.passes.at(np.arange(1, count)).tolist()
        beside_s = cost.context_s * cost.num_read(lengths)
        return [0.0, *[(seconds + beside_s) * factor for seconds in times_N]]

    def start_s(self, network: str, lengths: Iterable[int]) -> float:
        """Seconds of a network's drafts in a step, its passes excluded."""
        return self.table.drafters[network].step_s(lengths) * self._network(network)

    def catch_up_s(self, network: str, num_tokens: int) -> float:
        """Seconds to read num_tokens tokens more than in a usual step."""
        return self._table_catch_up_s(network, num_tokens) * self._network(network)

    def host_s(self, num_requests: int) -> float:
        """The host's part of a plain step."""
        return self.table.booking_s(num_requests, drafts=False) * self._host.value

    def drafting_s(self, num_requests: int) -> float:
        """Seconds of the host beyond host_s in a step in which a request drafts."""
        drafting_s = self.table.booking_s(num_requests, drafts=True) * self._drafting_host.value
        return max(0.0, drafting_s - self.host_s(num_requests))

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a step. The time of a network beside a prompt cannot be seen."""
        facts, decision = outcome.facts, outcome.decision
        lengths = [request.context_tokens for request in facts.requests]
        is_probe = decision.reason is Reason.NETWORK_PROBE
        network, pass_rows, unread = self._read(outcome)
        if not is_probe:
            self._observe_target(outcome, sum(lengths))
            drafts = bool(decision.grants)
            factor = self._drafting_host if drafts else self._host
            factor.observe(self.table.booking_s(len(lengths), drafts=drafts), outcome.host_s)
        if network and not facts.prompt_rows:
            cost = self.table.drafters[network]
            table_s = cost.step_s(lengths) + sum(cost.passes.at(np.array(pass_rows)).tolist())
            table_s += len(pass_rows) * cost.context_s * cost.num_read(lengths)
            table_s += self._table_catch_up_s(network, unread)
            self._networks[network].observe(table_s * self._machine.value, outcome.draft_s)

    def _observe_target(self, outcome: StepOutcome, context: int) -> None:
        """Learn from the time of a pass of the target."""
        num_rows, target = np.array(outcome.num_rows), self.table.target
        point = int(target.points(num_rows))
        table_s = float(target.at(num_rows)) + self._beside_s(context, len(outcome.facts.requests))
        table_s *= float(self._own_factors[point])
        surprise = self._machine.observe(table_s, outcome.target_s)
        near = NEIGHBOUR_SHARE ** np.abs(np.arange(len(self._own)) - point)
        self._num_own[point] += 1
        gain = max(OWN_GAIN, 0.5 / self._num_own[point])
        self._own += (CHANGE_GAIN if abs(surprise) > MAX_LOG_STEP else gain) * surprise * near
        self._own_factors = np.exp(self._own)

    def _network(self, network: str) -> float:
        return self._networks[network].value * self._machine.value

    def _read(self, outcome: StepOutcome) -> tuple[str, list[int], int]:
        """The network that drafted ("": none), rows of each of its passes, and tokens that it read
        to catch up."""
        requests = {request.request_id: request for request in outcome.facts.requests}
        grants = {grant.request_id: grant for grant in outcome.decision.grants}
        network, pass_rows, unread = "", list[int](), 0
        for draft in outcome.drafts:
            grant = grants[draft.request_id]
            if grant.source not in self.table.drafters:
                continue
            network = grant.source
            # One for each level; the last one may have shown a poor margin.
            num_levels = max(draft.drafted, len(draft.margins))
            passes = min(self.table.drafters[network].max_passes, num_levels)
            if not outcome.is_held:  # the first step of a decision caught up
                unread += requests[draft.request_id].unread_tokens
            pass_rows += [0] * (passes - len(pass_rows))
            for level in range(passes):
                pass_rows[level] += grant.shape[level - 1] if grant.shape and level else 1
        return network, pass_rows, unread

    def _table_catch_up_s(self, network: str, num_tokens: int) -> float:
        return float(self.table.drafters[network].catch_up.at(np.array(num_tokens)))

    def _beside_s(self, context: int, num_requests: int) -> float:
        table = self.table
        return table.context_s * context + table.request_s * max(0, num_requests - 1)
