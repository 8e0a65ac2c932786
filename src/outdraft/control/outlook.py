"""A step as it would be without drafts, and how speculation has fared at this size of the batch."""

from dataclasses import dataclass, field

from outdraft.control.drift import Costs
from outdraft.control.facts import StepFacts
from outdraft.control.guard import Guard
from outdraft.control.lessons import Lessons
from outdraft.control.plans import Plan, Prices

SPEEDUP_RATE = 1 / 32  # of the latest step in the long run's averages


@dataclass(frozen=True, slots=True)
class Outlook:
    """A step without drafts.

    Attributes:
        first_row: rows that it has in any case: newest tokens and prompts.
        context: tokens of all requests' contexts.
        alone_s: what it would take without its prompts,
        plain_s: and with them.
        drafting_s: what the host would take beyond that if anybody drafted, to decide included.
    """

    num_requests: int
    first_row: int
    context: int
    host_s: float
    alone_s: float
    plain_s: float
    drafting_s: float

    @classmethod
    def of(
        cls,
        facts: StepFacts,
        costs: Costs,
        lessons: Lessons | None = None,
        new_share: float = 1.0,
    ) -> "Outlook":
        """The outlook of a step.

        lessons: None: to decide and to learn takes no time. new_share: of the steps with offers
        that have to be decided anew.
        """
        count = len(facts.requests)
        context = sum(request.context_tokens for request in facts.requests)
        first = count + facts.prompt_rows
        host_s = costs.host_s(count)
        alone_s = host_s + costs.target_s(count, context, count)
        plain_s = alone_s
        if facts.prompt_rows:
            plain_s = host_s + costs.target_s(first, context, count)
        drafting_s = costs.drafting_s(count)
        if lessons is not None:
            share = new_share if facts.has_offers else 0.0
            drafting_s += lessons.seconds_a_step(alone_s, share)
        return cls(count, first, context, host_s, alone_s, plain_s, drafting_s)

    def plain_tokens(self, step_s: float) -> float:
        """What plain decoding brings in the time of a step that took so long, its prompts aside."""
        return self.num_requests * (step_s - (self.plain_s - self.alone_s)) / self.alone_s

    def gain(self, tokens: float, step_s: float) -> float:
        """Tokens a second against plain decoding, minus 1."""
        if not self.num_requests:
            return 0.0
        return tokens / max(self.plain_tokens(step_s), 1e-9) - 1

    def step_s(self, plan: Plan) -> float:
        """The step with a plan, its share of catching up included."""
        return self.host_s + plan.target_s + plan.draft_s + plan.fixed_s

    def prices(self, facts: StepFacts, network: str | None, costs: Costs) -> Prices:
        """What drafts cost, for a long run as fast as plain decoding."""
        most = min(facts.max_rows, sum(request.most_rows for request in facts.requests))
        pass_N, max_passes, start_s = [0.0, 0.0], 0, 0.0
        if network is not None:
            lengths = [request.context_tokens for request in facts.requests]
            context = costs.drafter(network).num_read(lengths)
            pass_N = costs.pass_N(network, 1 + self.num_requests + most, context)
            max_passes = costs.drafter(network).max_passes
            start_s = costs.start_s(network, lengths) + costs.beside_s(network)
        return Prices(
            costs.target_N(self.first_row, 1 + most, self.context, self.num_requests),
            pass_N,
            max_passes,
            self.num_requests / self.alone_s,
            start_s,
            self.drafting_s,
        )


@dataclass(slots=True)
class Regime:
    """Batches of about one size: as many requests, up to twice as many.

    The long run's rate is a ratio of sums: offers of the host come and go from step to step, and
    what a rich step may spend depends on what the time would bring in poor ones.

    Attributes:
        tokens: per step, fading.
        plain_tokens: what plain decoding would have brought in the same time.
        num_plain_bursts: how often plain decoding was timed while drafts paid; at least 1 once it
            was timed at all.
    """

    guard: Guard = field(default_factory=Guard)
    lessons: Lessons = field(default_factory=Lessons)
    tokens: float = 0.0
    plain_tokens: float = 0.0
    num_steps: int = 0
    num_plain_bursts: int = 0

    @property
    def speedup(self) -> float:
        """Tokens in the long run for each one of plain decoding, which is always possible."""
        return max(1.0, self.tokens / self.plain_tokens) if self.num_steps else 1.0

    def observe(self, tokens: float, plain_tokens: float, num_steps: int) -> None:
        """Add steps that were planned alike; only those without prompts, see docs/design/0012."""
        self.num_steps += num_steps
        rate = min(1.0, num_steps * max(SPEEDUP_RATE, 1 / self.num_steps))
        self.tokens += rate * (tokens - self.tokens)
        self.plain_tokens += rate * (plain_tokens - self.plain_tokens)
