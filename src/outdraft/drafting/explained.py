"""Decisions in the words and numbers that metrics, traces and the page show."""

from outdraft.control.facts import Decision, Reason
from outdraft.core.decided import Prediction, StepDecision

_WORDS = {reason: reason.name.lower() for reason in Reason}
# Reasons that control never hears of.
DISABLED = StepDecision("disabled")  # more requests run than may speculate
NOT_WANTED = StepDecision("not_wanted")  # no request may draft, or none wants to
_STANDING = {reason: StepDecision(word) for reason, word in _WORDS.items()}

REASONS = (*_WORDS.values(), DISABLED.reason, NOT_WANTED.reason)


def explained(decision: Decision, *, is_held: bool = False) -> StepDecision:
    """Tell of a decided step. A policy of fixed lengths predicts nothing and has no price.

    is_held: the decision was made for an earlier step.
    """
    if decision.plain_s == 0:
        return _STANDING[decision.reason]
    return StepDecision(
        _WORDS[decision.reason],
        decision.price if decision.grants else None,
        Prediction(
            decision.draft_s - (decision.catch_up_s if is_held else 0.0),
            decision.target_s,
            decision.host_s,
            decision.plain_s,
            decision.tokens,
            decision.gain,
        ),
    )
