"""Decisions on offers of the host that were made lately, for steps that are like those.

Offers differ from step to step, so that no decision can hold for the next one. But chances of
acceptance depend on little: the source, roughly the length of the match, and the length. Where
deciding takes long beside a step, an answer to the same question is used again for a while.
"""

from outdraft.control.facts import StepFacts
from outdraft.control.host_acceptance import bucket
from outdraft.control.standing import Standing

Question = tuple[object, ...]
AGE = 64  # steps that an answer is good for
MOST = 256  # answers
RATE = 1 / 32  # of the latest question in the share of new ones


class Answers:
    """Answers by question.

    Attributes:
        new_share: share of the questions about offers that had no answer lately; at first it is
            hoped that all will have one.
    """

    def __init__(self) -> None:
        self._known: dict[Question, tuple[int, Standing]] = {}
        self.new_share = 0.0

    def find(self, question: Question, step: int, *, has_offers: bool) -> Standing | None:
        """`step`: a number of steps that grows. `has_offers`: the question is about some."""
        known = self._known.get(question)
        is_good = known is not None and step - known[0] < AGE
        if has_offers:
            self.new_share += RATE * ((not is_good) - self.new_share)
        return known[1] if known is not None and is_good else None

    def put(self, question: Question, answer: Standing, step: int) -> None:
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[question] = step, answer

    def clear(self) -> None:
        self._known.clear()


def question(facts: StepFacts) -> Question:
    """What a decision hangs on, apart from what was learned; contexts grow slowly."""
    return (
        facts.prompt_rows,
        min(facts.max_rows, sum(request.max_drafts for request in facts.requests)),
        tuple(
            (
                r.request_id,
                r.max_drafts,
                r.network,
                r.rule,
                r.lag_tokens > 0,
                tuple((o.source, bucket(o.match_length), o.length, o.shape) for o in r.offers),
            )
            for r in facts.requests
        ),
    )
