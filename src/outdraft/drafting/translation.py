"""What a decision means for the engine: draft choices."""

from collections.abc import Mapping

from outdraft.core.decision import CHAIN, Decision, Grant
from outdraft.core.draft import DraftSource
from outdraft.core.plan import DraftChoice
from outdraft.drafting.host_sources import Drafts
from outdraft.drafting.known_requests import DrafterLimits, KnownRequests


class Translator:
    """Translates decisions."""

    def __init__(self, drafter: DrafterLimits | None, known: KnownRequests) -> None:
        self._drafter = drafter
        self._known = known

    def choices(self, decision: Decision, drafts: Mapping[str, Drafts]) -> dict[str, DraftChoice]:
        """Say what each request verifies; `drafts`: at hand, by request."""
        return self._with_room(
            {
                grant.request_id: self._choice(grant, drafts.get(grant.request_id, {}))
                for grant in decision.grants
            }
        )

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

    def _choice(self, grant: Grant, drafts: Drafts) -> DraftChoice:
        source = DraftSource(grant.source)
        if source in drafts:
            return DraftChoice(source, drafts[source].first_levels(grant.levels))
        assert self._drafter is not None
        drafting = self._drafter.drafting
        if grant.shape == CHAIN and self._drafter.chain is not None:
            drafting = self._drafter.chain
        return DraftChoice(source, num_model_drafts=grant.rows, model=drafting, stop=grant.stop)
