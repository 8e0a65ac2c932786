"""A device for replays: texts come from a trace, times from a table of costs.

For the scheduler and the policy it is a runner. A draft of the host is
compared with the text that came. A network's is as lucky as the trace says.
"""

from dataclasses import dataclass, field

import numpy as np

from outdraft.control.costs import CostTable
from outdraft.core.draft import Draft
from outdraft.core.plan import DraftChoice, PhaseTimes, StepPlan, StepResult, Work, WorkResult
from outdraft.core.recorded import RecordedOutput
from outdraft.core.request import Request, ScheduledStep
from outdraft.drafting.request_limits import DrafterLimits
from outdraft.planning.recorded_acceptance import RecordedAcceptance

WRONG_ID = 0  # of a network's draft that is refused; it is never read


@dataclass(slots=True)
class ReplayedText:
    """One sequence of a trace that is replayed.

    Attributes:
        index: of its request in the trace.
        output: what came.
        arrival_s: after that of the trace's first request.
        first_s, end_s: times of the replay; None until then.
        steps: (tokens, drafted, accepted) of each step that brought tokens.
    """

    request: Request
    index: int
    rule: str
    output: RecordedOutput
    arrival_s: float
    first_s: float | None = None
    end_s: float | None = None
    steps: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])

    @property
    def left(self) -> int:
        return len(self.output.token_ids) - self.request.num_output

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None: it has none."""
        count = self.request.num_output - 1
        if self.first_s is None or self.end_s is None or count < 1:
            return None
        return (self.end_s - self.first_s) / count


class ReplayedDevice:
    """Executes plans.

    network: of the drafts that no host makes; None: there are none. drafter: what its passes are
    like.
    """

    def __init__(
        self,
        table: CostTable,
        network: RecordedAcceptance | None,
        drafter: DrafterLimits | None,
    ) -> None:
        self._table = table
        self._network, self._drafter = network, drafter
        self._cost = None if network is None else table.drafters.get(str(network.source))

    def execute(self, step: ScheduledStep, texts: dict[str, ReplayedText]) -> StepResult:
        """Tokens of a step, and its times."""
        draft_s, plan = self._draft_s(step), step.plan
        results = tuple(
            self._verify(work, texts[request.id])
            for request, work in zip(step.requests, step.works, strict=True)
        )
        table, count = self._table, len(plan.works)
        context = sum(work.start + work.num_new for work in plan.works)
        target_s = float(table.target.at(np.array(plan.num_rows))) + table.context_s * context
        target_s += table.request_s * (count - 1)
        return StepResult(results, plan.num_rows, PhaseTimes(draft_s, target_s, 0.0))

    def host_s(self, plan: StepPlan) -> float:
        """The host's part of a step."""
        drafts = any(work.drafts is not None for work in plan.works)
        return self._table.booking_s(len(plan.works), drafts=drafts)

    def _draft_s(self, step: ScheduledStep) -> float:
        """The network's passes and its catching up."""
        cost, drafter = self._cost, self._drafter
        drafting = [
            (request, work.drafts)
            for request, work in zip(step.requests, step.works, strict=True)
            if work.drafts is not None and work.drafts.num_model_drafts
        ]
        if cost is None or drafter is None or not drafting:
            return 0.0
        lengths = [request.num_tokens for request, _ in drafting]
        context = cost.num_read(lengths)
        seconds, level = cost.step_s(lengths), 0
        while rows := sum(_pass_rows(choice, level) for _, choice in drafting):
            if level < cost.max_passes:
                seconds += float(cost.passes.at(np.array(rows))) + cost.context_s * context
            level += 1
        unread = sum(drafter.unread_tokens(request) for request, _ in drafting)
        return seconds + float(cost.catch_up.at(np.array(unread)))

    def _verify(self, work: Work, text: ReplayedText) -> WorkResult:
        if not work.samples:
            return WorkResult()
        choice, place = work.drafts, text.request.num_output
        future = text.output.token_ids[place:]
        if choice is None:
            return WorkResult(tuple(future[:1]))
        if choice.num_model_drafts:
            draft, rows = self._network_draft(choice, text, future)
        else:
            draft = choice.draft
            rows = followed_rows(draft, future)
        return WorkResult(
            tuple(future[: len(rows) + 1]),
            rows,
            drafted_ids=draft.token_ids,
            drafted_parents=draft.parents,
        )

    def _network_draft(
        self, choice: DraftChoice, text: ReplayedText, future: list[int]
    ) -> tuple[Draft, tuple[int, ...]]:
        """A draft of the shape that was chosen; what is accepted is the first row of each level."""
        assert self._network is not None
        sizes = level_sizes(choice)
        place = text.request.num_output
        most = min(len(sizes), len(future))
        accepted = self._network.accepted(text.index, text.rule, int(text.request.id), place, most)
        token_ids, parents, firsts, above = list[int](), list[int](), list[int](), 0
        for level, size in enumerate(sizes):
            firsts.append(len(token_ids))
            right = future[level] if level < accepted else WRONG_ID
            token_ids += [right, *[WRONG_ID] * (size - 1)]
            parents += [above] * size
            above = firsts[-1] + 1
        return Draft(tuple(token_ids), tuple(parents)), tuple(firsts[:accepted])


def followed_rows(draft: Draft, future: list[int]) -> tuple[int, ...]:
    """Rows of the draft that the text went along, from the root down."""
    edges = list(zip(draft.parents, draft.token_ids, strict=True))
    rows, above = list[int](), 0
    for token_id in future:
        if (above, token_id) not in edges:
            break
        rows.append(edges.index((above, token_id)))
        above = rows[-1] + 1
    return tuple(rows)


def level_sizes(choice: DraftChoice) -> list[int]:
    """Rows of each level that a network drafts; the last one may be cut."""
    left, sizes = choice.num_model_drafts, list[int]()
    levels = choice.levels or (1,) * left
    for size in levels:
        if left <= 0:
            break
        sizes.append(min(size, left))
        left -= sizes[-1]
    return sizes


def _pass_rows(choice: DraftChoice, level: int) -> int:
    """Rows that the pass for a level reads: those of the level above."""
    sizes = level_sizes(choice)
    if level >= len(sizes):
        return 0
    return sizes[level - 1] if level else 1
