"""What a settled token says of the draft that a network would have made of it: by enumeration.

The token was chosen by the target. Whether it is the network's best token has, over all such
tokens, the chance with which that best token is accepted as a draft. If drafts are drawn, no
function of the network's distribution and the token has this chance: it hangs on the target's.
"""

from collections import defaultdict

import numpy as np
import pytest

from outdraft.kernels.reference.verification import reject_tokens, traverse
from tests.verification.enumeration import V, each_chain_emits, random_model
from tests.verification.test_lengths_exact import law_behind_host
from tests.verification.test_verify_exact import every_chain

RULES = {"token": reject_tokens, "block": traverse}
SEEDS = range(8)


def accepted_if_drawn(method: str, seed: int) -> float:
    """The chance that the first draft of a chain is accepted."""
    drafts, logits_RV, weights = every_chain(*random_model(seed, ("plain",)), 1)
    emitted = each_chain_emits(RULES[method], drafts, logits_RV)
    chance = 0.0
    for law, weight in zip(emitted, weights, strict=True):
        chance += weight * sum(share for text, share in law.items() if len(text) == 2)
    return chance


@pytest.mark.parametrize("seed", SEEDS)
def test_whether_it_is_the_best_token_has_the_chance_of_a_draft_that_is_the_best_token(seed: int):
    target, proposer = random_model(seed, ("plain",))
    best = int(np.argmax(proposer(())))
    lengths = defaultdict[int, float](float)
    for text, share in law_behind_host(target, (best,)).items():
        lengths[len(text)] += share
    label = sum(chance * (token == best) for token, chance in enumerate(target(())))
    assert label == pytest.approx(lengths[2])


@pytest.mark.parametrize("method", RULES)
def test_of_drafts_that_are_drawn_it_says_something_else(method: str):
    gaps = dict[str, list[float]](best=[], probability=[])
    for seed in SEEDS:
        target_V, drafted_V = (model(()) for model in random_model(seed, ("plain",)))
        chance = accepted_if_drawn(method, seed)
        assert chance == pytest.approx(sum(map(min, target_V, drafted_V)))
        gaps["best"].append(target_V[int(np.argmax(drafted_V))] - chance)
        gaps["probability"].append(sum(target_V[x] * drafted_V[x] for x in range(V)) - chance)
    assert max(map(abs, gaps["best"])) > 0.1
    assert max(gaps["probability"]) < -0.05  # a bound from below, and a bad one
