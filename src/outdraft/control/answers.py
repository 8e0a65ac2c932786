"""Decisions on offers of the host that were made lately, for steps that are like those.

Offers differ from step to step, so that no decision can hold for the next one. But chances of
acceptance depend on little: the source, roughly the length of the match, and the length. Where
deciding takes long beside a step, an answer to the same question is used again for a while: for
other requests, too, unless it is about a network, which fares differently with each.
"""

from dataclasses import dataclass, replace

from outdraft.control.facts import Decision, StepFacts
from outdraft.control.host_acceptance import bucket
from outdraft.control.standing import Standing

Question = tuple[object, ...]
AGE = 64  # steps that an answer is good for
MOST = 256  # answers
RATE = 1 / 32  # of the latest question in the share of new ones


@dataclass(slots=True)
class _Answer:
    """`request_ids`: whom the decision names, in batch order."""

    step: int
    standing: Standing
    request_ids: tuple[str, ...]


class Answers:
    """Answers by question.

    Attributes:
        new_share: share of the questions about offers that had no answer lately; at first it is
            hoped that all will have one.
    """

    def __init__(self) -> None:
        self._known: dict[Question, _Answer] = {}
        self.new_share = 0.0

    def find(self, question: Question, facts: StepFacts, step: int) -> Standing | None:
        """What answers the question, which the facts ask; `step`: a number of steps that grows."""
        known = self._known.get(question)
        if known is not None and step - known.step >= AGE:
            known = None
        if facts.has_offers:
            self.new_share += RATE * ((known is None) - self.new_share)
        if known is None:
            return None
        request_ids = _ids(facts)
        if request_ids != known.request_ids:
            known.standing.decision = _for_others(
                known.standing.decision, dict(zip(known.request_ids, request_ids, strict=True))
            )
            known.request_ids = request_ids
        return known.standing

    def put(self, question: Question, answer: Standing, facts: StepFacts, step: int) -> None:
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[question] = _Answer(step, answer, _ids(facts))

    def clear(self) -> None:
        self._known.clear()


def question(facts: StepFacts) -> Question:
    """What a decision hangs on, apart from what was learned."""
    return (
        facts.prompt_rows,
        min(facts.max_rows, sum(request.max_drafts for request in facts.requests)),
        tuple(
            (
                # Contexts grow slowly within a request.
                r.request_id if r.network is not None else r.context_tokens.bit_length(),
                r.max_drafts,
                r.network,
                r.rule,
                r.lag_tokens > 0,
                tuple((o.source, bucket(o.match_length), o.length, o.shape) for o in r.offers),
            )
            for r in facts.requests
        ),
    )


def _ids(facts: StepFacts) -> tuple[str, ...]:
    return tuple(request.request_id for request in facts.requests)


def _for_others(decision: Decision, heirs: dict[str, str]) -> Decision:
    """The decision with other names for its requests."""
    return replace(
        decision,
        grants=tuple(replace(one, request_id=heirs[one.request_id]) for one in decision.grants),
        shadows=tuple(heirs[one] for one in decision.shadows),
    )
