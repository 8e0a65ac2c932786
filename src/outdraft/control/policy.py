"""What decides lengths: the controller, or a rule that never learns."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from outdraft.control.facts import Decision, Fate, ShadowOutcome, StepFacts, StepOutcome


class LengthPolicy(Protocol):
    """Is told facts before a step and the outcome after it."""

    @property
    def wants_offers(self) -> bool:
        """Whether the sources of the host should look for drafts before the next decision."""
        ...

    @property
    def standing(self) -> Decision | None:
        """What decided the step if `try_hold` was just true."""
        ...

    def standing_for(self, request_ids: Sequence[str]) -> Decision:
        """`standing`, which drafts: requests that came since have the places of ended ones."""
        ...

    def try_hold(self, num_requests: int, prompt_rows: int = 0) -> bool:
        """Whether `standing` is good for the step, so that nobody needs to decide; then it counts
        the step."""
        ...

    def quiet_steps(self, *, may_find: bool) -> int:
        """Steps that follow a plain one that `try_hold` was just true for, and are sure to be like
        it: `standing` is good for them, too, if the batch remains as it is, and nothing is to be
        learned from them.

        may_find: sources of the host may have offers, so that looks are to be due in none of them.
        """
        ...

    def rest(self) -> None:
        """One of `quiet_steps` begins. Nothing else is asked, or told, of it."""
        ...

    @property
    def wants_outcome(self) -> bool:
        """Whether the step that was decided, or held, just now should be told to `observe`."""
        ...

    @property
    def is_passing(self) -> bool:
        """Whether it should be told to `pass_by`."""
        ...

    def pass_by(
        self,
        num_tokens: int,
        draft_s: float,
        host_s: float,
        step_s: float,
        fates: Iterable[Fate] = (),
    ) -> None:
        """A step of a decision that holds for several is over. Steps may fail.

        fates: of its drafts, if `observe` is not told of them; looked at when it is needed.
        """
        ...

    def looked(self, step_s: float, prompt_rows: int) -> None:
        """Sources of the host looked for drafts before the step that was decided, or held, last;
        they may have found none. With the look it took so long, and had so many rows of prompts."""
        ...

    def observe_keeping(self, seconds: float) -> None:
        """In a step without drafts and prompts it took so long to keep the target's states."""
        ...

    def network_due_in(self, num_running: int, *, has_prompts: bool = False) -> int:
        """Steps until a network may draft again for so many requests, as far as is known; 0 while
        it does in earnest, and reads prompts as they pass by.

        has_prompts: the step in question reads some; the network may draft behind them.
        """
        ...

    @property
    def wants_plain_time(self) -> bool:
        """Whether the step that `try_hold` was just true for should be told to `observe_plain`."""
        ...

    def observe_plain(
        self, num_requests: int, context_tokens: int, target_s: float, host_s: float
    ) -> None:
        """What a step without drafts and prompts took, when plain decoding has gone on a while."""
        ...

    def observe_shadows(self, shadows: Sequence[ShadowOutcome]) -> None:
        """Drafts that nobody verified met their text in a step that was held."""
        ...

    @property
    def wants_margins(self) -> bool:
        """Whether networks should tell the margins of their chains, and what they would have
        drafted where they catch up, in the step that was decided, or held, just now."""
        ...

    @property
    def has_wrong_costs(self) -> bool:
        """Whether the table of costs that it decides by should be measured again."""
        ...

    def decide(self, facts: StepFacts) -> Decision:
        """How the step that begins now speculates. A grant's host draft is one of the offers."""
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """A step is over. Not every decision is followed by this: steps may fail."""
        ...

    def forget(self, request_id: str) -> None:
        """The request ended; unknown ids are fine."""
        ...
