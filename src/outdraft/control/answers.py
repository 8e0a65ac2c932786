"""Decisions on offers of the host that were made lately, for steps that are like those.

Offers differ from step to step, so that no decision can hold for the next one. But chances of
acceptance depend on little: the source, roughly the length of the match, and the length. Where
deciding takes long beside a step, an answer to the same question is used again for a while: for
other requests, too, unless a network has shown how easy one of them is to draft for.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from outdraft.control.facts import Decision, RequestFacts, StepFacts
from outdraft.control.host_acceptance import bucket
from outdraft.control.standing import Standing

Question = tuple[object, ...]
AGE = 64  # steps that an answer is good for
MOST = 256  # answers,
MOST_KNOWN = 8  # and decisions about steps without offers
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


class KnownDecisions:
    """The last decisions about steps without offers: for a batch that goes on, and against drafts
    for whoever comes, with and without a prompt beside."""

    def __init__(self) -> None:
        self._known: dict[Question, tuple[Standing, int]] = {}

    def find(self, question: Question, facts: StepFacts) -> tuple[Standing, int] | None:
        """The decision, and the number of the step that it was made in."""
        known = self._known.get(question)
        if known is None or not known[0].drafts:
            return known
        ids = _ids(facts)
        names = [grant.request_id for grant in known[0].decision.grants]
        return known if all(name in ids for name in names) else None

    def put(self, question: Question, decided: Standing, step: int) -> None:
        """One that drafts teaches, so that older ones are outdated."""
        if decided.drafts or len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[question] = decided, step

    def clear(self) -> None:
        self._known.clear()


def question(facts: StepFacts, is_known: Callable[[RequestFacts], bool]) -> Question:
    """What a decision hangs on, apart from what was learned of all requests.

    is_known: whether anything was learned of a request itself, for which a network may draft.
    """
    return (
        facts.prompt_rows.bit_length(),
        min(facts.max_rows, sum(request.max_drafts for request in facts.requests)),
        tuple(
            (
                _who(r, is_known),
                r.max_drafts,
                r.network,
                r.rule,
                r.lag_tokens.bit_length(),
                tuple((o.source, bucket(o.match_length), o.length, o.shape) for o in r.offers),
            )
            for r in facts.requests
        ),
    )


def _who(request: RequestFacts, is_known: Callable[[RequestFacts], bool]) -> str | int:
    if request.network is None:
        return request.context_tokens.bit_length()
    if is_known(request):
        return request.request_id  # whose context grows slowly
    return request.max_tokens.bit_length()  # over which catching up is paid


def _ids(facts: StepFacts) -> tuple[str, ...]:
    return tuple(request.request_id for request in facts.requests)


def _for_others(decision: Decision, heirs: dict[str, str]) -> Decision:
    """The decision with other names for its requests."""
    return replace(
        decision,
        grants=tuple(replace(one, request_id=heirs[one.request_id]) for one in decision.grants),
        shadows=tuple(heirs[one] for one in decision.shadows),
    )
