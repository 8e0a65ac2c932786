"""What a decision means for the engine: draft choices, and what is told of it."""

from collections.abc import Mapping
from dataclasses import field

from outdraft.control.facts import CHAIN, Decision, Grant
from outdraft.core.decided import StepDecision
from outdraft.core.draft import DraftSource
from outdraft.core.plan import DraftChoice, LiveStop
from outdraft.core.record import record
from outdraft.drafting.explained import explained
from outdraft.drafting.host_sources import Drafts
from outdraft.drafting.known_requests import DrafterLimits, KnownRequests


@record
class _Translated:
    """A decision in the words of the engine.

    Attributes:
        told: of the step that was decided; told_held: of the steps that the decision holds for.
        choices: by request; with margins that are told, and without.
    """

    decision: Decision
    told: StepDecision
    told_held: StepDecision
    choices: dict[bool, dict[str, DraftChoice]] = field(
        default_factory=dict[bool, dict[str, DraftChoice]]
    )


class Translator:
    """Translates decisions; one that holds for several steps once, and once for its lesson."""

    def __init__(self, drafter: DrafterLimits | None, known: KnownRequests) -> None:
        self._drafter = drafter
        self._known = known
        self._newest: _Translated | None = None

    def translated(
        self, decision: Decision, drafts: Mapping[str, Drafts], *, margins: bool, is_held: bool
    ) -> tuple[StepDecision, dict[str, DraftChoice]]:
        """What is told of a decision, and what each request verifies.

        drafts: at hand, by request. margins: a network tells them, and is compared with what it
        catches up with. is_held: the decision was made for an earlier step.
        """
        newest = self._newest
        if newest is None or newest.decision is not decision or drafts:
            newest = _Translated(decision, explained(decision), explained(decision, is_held=True))
            self._newest = None if drafts else newest
        choices = newest.choices.get(margins)
        if choices is None:
            choices = newest.choices[margins] = self._with_room(
                {
                    grant.request_id: self._choice(
                        grant, decision, drafts.get(grant.request_id, {}), margins=margins
                    )
                    for grant in decision.grants
                }
            )
        return newest.told_held if is_held else newest.told, choices

    def _with_room(self, choices: dict[str, DraftChoice]) -> dict[str, DraftChoice]:
        """Choices whose probabilities fit into memory: where a network draws for many requests at
        once, each has fewer drafts, and past `most_drawn` requests the last ones have none."""
        most = None if self._drafter is None else self._drafter.most_drawn
        drafted = [id_ for id_, choice in choices.items() if choice.num_model_drafts]
        if most is None or not any(self._known.draws(id_) for id_ in drafted):
            return choices
        counts = dict.fromkeys(drafted[:most], max(1, most // len(drafted)))
        fitting = dict[str, DraftChoice]()
        for id_, choice in choices.items():
            own = choice
            if choice.num_model_drafts:
                own = choice.truncated(counts.get(id_, 0))
            if own is not None:
                fitting[id_] = own
        return fitting

    def _choice(
        self, grant: Grant, decision: Decision, drafts: Drafts, *, margins: bool
    ) -> DraftChoice:
        source = DraftSource(grant.source)
        if source in drafts:
            return DraftChoice(source, drafts[source].first_levels(grant.levels))
        assert self._drafter is not None
        drafting, stop = self._drafter.drafting, None
        if grant.shape == CHAIN and self._drafter.chain is not None:
            drafting = self._drafter.chain
        teaches = margins and not drafting.is_tree
        if grant.stop is not None:
            stop = LiveStop(grant.stop.weights, grant.stop.biases, decision.price, decision.row_cap)
        elif teaches:
            stop = LiveStop((0.0,) * grant.levels, (0.0,) * grant.levels, price=0.0)
        teaches = teaches and self._known.teaches(grant.request_id)
        return DraftChoice(
            source, num_model_drafts=grant.rows, model=drafting, stop=stop, teaches=teaches
        )
