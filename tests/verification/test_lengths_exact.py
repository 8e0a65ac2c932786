"""Lengths of drafts that follow signals leave the law of all texts alone: by enumeration.

Two requests draft side by side. Every pair of drafts that their network may draw is looked at; the
rule under test says how many tokens of each are verified, the assembled verifier says what each
request then emits, and the joint law of both texts must be that of plain decoding. It is joint
because a length may follow the *other* request's draft, too.

What is allowed: to decide about a token before it is drawn, from finished steps and from tokens
that were drawn earlier, and never to take it back. The rules that break this, in ways in which
engines do, are here as well: the enumeration sees each of them.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from outdraft.core.decision import LiveStop
from outdraft.core.draft import Draft
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.torch.verification import match
from tests.reference.verification import all_sequences, completed, joint
from tests.verification.enumeration import V, each_chain_emits, random_model
from tests.verification.live_lengths import live_lengths
from tests.verification.test_verify_exact import every_chain
from tests.verification.test_verify_mixtures import without_seed

LENGTH = 3  # tokens of a text whose law is compared
DEPTH = 2  # levels that a draft may have
METHODS = ("token", "block")
TEXTS = all_sequences(V, LENGTH)
Chain = tuple[int, ...]
Chains = tuple[Chain, Chain]
Lengths = Callable[[Chains], tuple[int, int]]
Told = Callable[[int, Chain, int], float]  # log-odds of a request's level

TARGETS = [random_model(seed, ("plain",))[0] for seed in (1, 2)]
# What the network draws from, behind each draft. It is sure of itself behind a 0 of the first
# request, and behind a 1 of the second.
PROPOSERS = (
    {(): (0.5, 0.3, 0.2), (0,): (0.9, 0.06, 0.04), (1,): (0.4, 0.35, 0.25), (2,): (0.6, 0.3, 0.1)},
    {(): (0.6, 0.3, 0.1), (0,): (0.35, 0.34, 0.31), (1,): (0.1, 0.85, 0.05), (2,): (0.5, 0.3, 0.2)},
)  # fmt: skip


def proposer(which: int, prefix: Chain) -> np.ndarray:
    return np.array(PROPOSERS[which][prefix])


def as_vector(law) -> np.ndarray:
    return np.array([law.get(text, 0.0) for text in TEXTS])


@cache
def laws_behind(method: str, which: int, length: int) -> dict[Chain, np.ndarray]:
    """By draft of this length: the law of a request's text if that is what is verified."""
    target = TARGETS[which]
    if length == 0:
        return {(): as_vector(joint(target, LENGTH))}
    drafts, logits_RV, _ = every_chain(target, lambda prefix: proposer(which, prefix), length)
    emitted = each_chain_emits(without_seed(method), drafts, logits_RV)
    laws = (as_vector(completed(law, target, LENGTH)) for law in emitted)
    return dict(zip(all_sequences(V, length), laws, strict=True))


def law_behind_host(target, chain: Chain) -> dict[Chain, float]:
    """What is emitted if the host drafts this chain, which is matched with the target's choices."""
    choices = all_sequences(V, len(chain) + 1)
    drafts = DraftBatch.from_drafts([Draft.chain(chain)] * len(choices), "cpu")
    verdict = match(torch.tensor(choices).flatten(), drafts)
    emitted = defaultdict[Chain, float](float)
    for ids, count, own in zip(
        verdict.token_ids_BN1.tolist(), verdict.num_emitted_B.tolist(), choices, strict=True
    ):
        weight = np.prod([target(chain[:row])[choice] for row, choice in enumerate(own)])
        emitted[tuple(ids[:count])] += float(weight)
    return emitted


def joint_law(method: str, lengths: Lengths, hosted: Chain | None = None) -> np.ndarray:
    """What both requests emit if `lengths` says how much of each draft is verified.

    hosted: the first request's draft, if it is one of the host.
    """
    law = np.zeros((len(TEXTS), len(TEXTS)))
    for first in all_sequences(V, DEPTH) if hosted is None else [hosted]:
        for second in all_sequences(V, DEPTH):
            weight = (1.0 if hosted is not None else chance(0, first)) * chance(1, second)
            one, other = lengths((first, second))
            if hosted is None:
                own = laws_behind(method, 0, one)[first[:one]]
            else:
                emitted = law_behind_host(TARGETS[0], first[:one])
                own = as_vector(completed(emitted, TARGETS[0], LENGTH))
            law += weight * np.outer(own, laws_behind(method, 1, other)[second[:other]])
    return law


def chance(which: int, chain: Chain) -> float:
    """That the network draws it."""
    return float(np.prod([proposer(which, chain[:i])[x] for i, x in enumerate(chain)]))


def bias(method: str, lengths: Lengths, hosted: Chain | None = None) -> float:
    """Total variation between the law of both texts and plain decoding's."""
    plain = np.outer(*(as_vector(joint(target, LENGTH)) for target in TARGETS))
    return float(np.abs(joint_law(method, lengths, hosted) - plain).sum() / 2)


def live(
    price: float,
    *,
    bias_of: tuple[float, float] = (0.0, 0.0),
    row_cap: int = 1 << 30,
    wanted: tuple[int, int] = (DEPTH, DEPTH),
    num_host_rows: int = 0,
    told: Told | None = None,
) -> Lengths:
    """The engine's own live rule, with a price, weights and levels of finished steps."""
    stops = [LiveStop((1.0,) * DEPTH, (one,) * DEPTH, price, row_cap) for one in bias_of]
    return lambda chains: live_lengths(proposer, chains, stops, wanted, num_host_rows, told)


EVEN = 5.0  # what even odds count as, in the place of a margin


def behind_the_token_above(which: int, chain: Chain, level: int) -> float:
    """Log-odds as a confidence head tells them: of a level's row, and of the token before it."""
    return (0.8, 0.3)[which] if level == 0 else (2.0, -1.5, 0.4)[chain[level - 1]]


def of_the_draft_itself(which: int, chain: Chain, level: int) -> float:
    """As a head would that reads the token of its own level."""
    return (2.0, -1.5, 0.4)[chain[level]]


def lengths_of(rule: Lengths) -> set[tuple[int, int]]:
    """All that come up."""
    every = all_sequences(V, DEPTH)
    return {rule((first, second)) for first in every for second in every}


# What the engine does.

IN_USE: dict[str, Lengths] = {
    "levels of finished steps": lambda _: (2, 1),
    "a live price": live(0.4),
    "a higher live price": live(0.58),
    "a live price, and offsets of requests": live(0.3, bias_of=(-0.8, 0.5)),
    "a live price with a cap of three rows": live(0.4, row_cap=3),
    "a cap that drafts of the host share": live(0.4, row_cap=4, num_host_rows=1),
    "levels that differ by request under a live price": live(0.4, wanted=(2, 1)),
    "a live price of odds that a network tells": live(
        0.4, bias_of=(-EVEN, -EVEN), told=behind_the_token_above
    ),
    "a live price of told odds, with a cap of three rows": live(
        0.3, bias_of=(-EVEN, -EVEN), row_cap=3, told=behind_the_token_above
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", IN_USE)
def test_signals_in_use_leave_the_joint_law_alone(rule: str, method: str):
    assert bias(method, IN_USE[rule]) < 1e-12


@pytest.mark.parametrize("rule", [rule for rule in IN_USE if "live price" in rule])
def test_live_rules_do_give_different_lengths(rule: str):
    assert len(lengths_of(IN_USE[rule])) >= 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("hosted", [(0, 0), (1, 2), (2, 1)])
def test_a_draft_of_the_host_may_be_cut_by_anything_that_is_known(hosted: Chain, method: str):
    """Nothing was drawn for it, so neither its tokens nor the other's live draft is news."""

    def lengths(chains: Chains) -> tuple[int, int]:
        own = drawn_probability(chains)[0]
        return min(own, 2 - (chains[1][0] == 1)), live(0.4)(chains)[1]

    assert bias(method, lengths, hosted) < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_a_length_may_follow_what_the_other_request_drew(method: str):
    """A cap on rows lets it: the first request's second row leaves no room for the other's."""

    def lengths(chains: Chains) -> tuple[int, int]:
        return (2, 1) if chains[0][0] == 0 else (1, 2)

    assert bias(method, lengths) < 1e-12


# What it must not do: each of these is a natural thing to write.


def drawn_probability(chains: Chains) -> tuple[int, int]:
    """A token that came out unlikely is not verified."""

    def length(which: int) -> int:
        survival = 1.0
        for level, token in enumerate(chains[which]):
            survival *= proposer(which, chains[which][:level])[token]
            if survival < 0.25:
                return level
        return DEPTH

    return length(0), length(1)


def survivals(chains: Chains) -> list[list[float]]:
    """By request and level, from the best token's probability: known before the token is drawn."""
    best = [
        [float(proposer(which, chain[:level]).max()) for level in range(DEPTH)]
        for which, chain in enumerate(chains)
    ]
    return [np.cumprod(row).tolist() for row in best]


STAIRS = (0.0, 0.2, 1.2, 1.2, 1.2)  # what so many rows cost, in tokens
SMOOTH = (0.0, 0.3, 0.6, 0.9, 1.2)


def best_of_this_step(costs) -> Lengths:
    """All is drafted; then as many rows as pay best are verified, the likeliest first."""

    def lengths(chains: Chains) -> tuple[int, int]:
        table = survivals(chains)
        rows = sorted(
            ((table[which][level], -level, which) for which in (0, 1) for level in range(DEPTH)),
            reverse=True,
        )
        gains = [sum(row[0] for row in rows[:count]) - cost for count, cost in enumerate(costs)]
        owners = [which for _, _, which in rows[: int(np.argmax(gains))]]
        return owners.count(0), owners.count(1)

    return lengths


def dropped_whole(chains: Chains) -> tuple[int, int]:
    """A chain that looks poor at its end is taken back, though each signal was a fair one."""
    return tuple(DEPTH if row[-1] >= 0.3 else 0 for row in survivals(chains))


def cap_by_drawn_tokens(chains: Chains) -> tuple[int, int]:
    """Rows beyond the cap are dropped behind the drafts: those of the less likely text."""
    likelier = chance(0, chains[0]) >= chance(1, chains[1])
    return (2, 1) if likelier else (1, 2)


BIASED: dict[str, tuple[Lengths, float]] = {
    "the probability of the drawn token": (drawn_probability, 0.05),
    "the best number of rows of this step, with stairs": (best_of_this_step(STAIRS), 0.01),
    "chains that are dropped whole": (dropped_whole, 0.05),
    "rows that are dropped behind the drafts": (cap_by_drawn_tokens, 0.01),
    "odds of a network that has read the draft": (
        live(0.4, bias_of=(-EVEN, -EVEN), told=of_the_draft_itself),
        0.01,
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", BIASED)
def test_rules_that_look_at_too_much_are_seen(rule: str, method: str):
    lengths, least = BIASED[rule]
    assert bias(method, lengths) > least


@pytest.mark.parametrize("method", METHODS)
def test_the_best_number_of_rows_is_biased_by_its_stairs_alone(method: str):
    assert bias(method, best_of_this_step(SMOOTH)) < 1e-12
    assert bias(method, best_of_this_step(STAIRS)) > 0.01
