"""The controller's own decisions leave the law of two texts alone: by enumeration of two steps.

In the first step a network drafts one token for each of two requests. Each pair of outcomes, of
drafts and of coins, is told to a controller of its own; it decides how both draft in the second
step: whether, how deep, by the network or the host, and where their chains end by live margins. So
it may follow accepted lengths, margins, shadows of unused offers, and probes that go on or end.
What both requests emit in two steps must have the joint law of plain decoding.
"""

from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from msgspec import structs

from outdraft.control.controller import Controller
from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.control.facts import (
    DraftOutcome,
    HostOffer,
    RequestFacts,
    ShadowOutcome,
    StepFacts,
    StepOutcome,
)
from outdraft.control.probe import BURST
from outdraft.core.decision import Decision, Grant, Reason
from outdraft.drafting.device.live_stop import margins_B
from outdraft.kernels.torch.verification import reject_tokens, traverse
from tests.reference.verification import all_sequences, completed, joint
from tests.verification.enumeration import V, each_chain_emits, random_model
from tests.verification.live_lengths import live_lengths
from tests.verification.test_lengths_exact import law_behind_host
from tests.verification.test_verify_exact import every_chain

LENGTH = 3
DEPTH = 2
TEXTS = all_sequences(V, LENGTH)
MODELS = [random_model(seed, ("plain",)) for seed in (1, 2)]
RULES = {"token": reject_tokens, "block": traverse}
IDS = ("a", "b")
Text = tuple[int, ...]


def behind(model, text: Text):
    """The same model, with a text before each prefix."""
    return lambda prefix: model(text + tuple(prefix))


@cache
def outcomes(method: str, which: int) -> dict[Text, float]:
    """What the first step emits for a request: {tokens: probability}."""
    target, proposer = MODELS[which]
    drafts, logits_RV, weights = every_chain(target, proposer, 1)
    law = defaultdict[Text, float](float)
    for emitted, weight in zip(
        each_chain_emits(RULES[method], drafts, logits_RV), weights, strict=True
    ):
        for text, share in emitted.items():
            law[text] += weight * share
    return law


@cache
def laws(method: str, which: int, text: Text, length: int) -> dict[Text, np.ndarray]:
    """By draft of this length behind a text: the law of the request's first tokens."""
    target, proposer = (behind(model, text) for model in MODELS[which])
    if length == 0:
        return {(): as_vector(text, {(): 1.0}, which)}
    drafts, logits_RV, _ = every_chain(target, proposer, length)
    emitted = each_chain_emits(RULES[method], drafts, logits_RV)
    every = (as_vector(text, law, which) for law in emitted)
    return dict(zip(all_sequences(V, length), every, strict=True))


def as_vector(text: Text, emitted, which: int) -> np.ndarray:
    whole = {text + tokens: share for tokens, share in emitted.items()}
    law = completed(whole, MODELS[which][0], LENGTH)
    return np.array([law.get(one, 0.0) for one in TEXTS])


def margin(which: int, text: Text) -> float:
    return float(margins_B(torch.tensor(MODELS[which][1](text)).log()[None])[0])


def offered(which: int, text: Text) -> Text:
    """What the host would draft: a function of the text."""
    return ((text[-1] if text else which) + 1) % V, 0


@dataclass(frozen=True)
class Case:
    """A controller that is about to begin the first step.

    Attributes:
        sources: by request, of the second step: "network", "host", or both.
    """

    controller: Controller
    decision: Decision
    facts: StepFacts
    sources: tuple[str, str]


def first_facts() -> StepFacts:
    requests = (RequestFacts(name, 100, 1, 8, network="net") for name in IDS)
    return StepFacts(tuple(requests))


def second_facts(case: Case, texts: tuple[Text, Text]) -> StepFacts:
    def one(which: int) -> RequestFacts:
        source, text = case.sources[which], texts[which]
        offers = (HostOffer("suffix", DEPTH, 1 + 3 * text[0]),) if source != "network" else ()
        network = "net" if source != "host" else None
        return RequestFacts(IDS[which], 90, DEPTH, 8 + len(text), offers, network)

    return StepFacts((one(0), one(1)))


def outcome(case: Case, texts: tuple[Text, Text]) -> StepOutcome:
    """The first step, if it ended with these texts; unused offers of its hosts were compared."""
    drafts = tuple(
        DraftOutcome(
            IDS[which],
            1,
            len(text) - 1,
            (margin(which, ()),),
        )
        for which, text in enumerate(texts)
    )
    shadows = tuple(
        ShadowOutcome("suffix", 2, 1, int(text[0] == offered(which, ())[0]))
        for which, text in enumerate(texts)
        if case.sources[which] != "network"
    )
    decision, num_tokens = case.decision, sum(len(text) for text in texts)
    return StepOutcome(
        case.facts, decision, drafts, 4, num_tokens,
        decision.draft_s, decision.target_s, decision.host_s, shadows,
    )  # fmt: skip


def lengths_of(decision: Decision, texts: tuple[Text, Text], chains) -> tuple[int, ...]:
    """How much of each chain is verified; `chains`: what networks and hosts would draft."""
    grants = {grant.request_id: grant for grant in decision.grants}
    live = [grants.get(name) for name in IDS]
    wanted = [grant.levels if grant is not None else 0 for grant in live]
    networks = [at for at, grant in enumerate(live) if grant is not None and grant.source == "net"]
    if not networks:
        return tuple(wanted)
    stops = [
        one.stop
        if (one := live[at]) is not None and one.stop is not None and one.stop.may_end
        else None
        for at in networks
    ]
    num_host_rows = sum(count for at, count in enumerate(wanted) if at not in networks)
    found = live_lengths(
        lambda row, prefix: MODELS[networks[row]][1](texts[networks[row]] + prefix),
        [chains[at] for at in networks],
        stops,
        [wanted[at] for at in networks],
        num_host_rows,
    )
    for at, length in zip(networks, found, strict=True):
        wanted[at] = length
    return tuple(wanted)


def drafts_of(which: int, text: Text, grant: Grant | None) -> dict[Text, float]:
    """What may be drafted in the second step: {tokens: probability}."""
    if grant is None:
        return {(): 1.0}
    if grant.source != "net":
        return {offered(which, text)[: grant.levels]: 1.0}
    return joint(behind(MODELS[which][1], text), grant.levels)


def second_step(method: str, case: Case, texts: tuple[Text, Text], decision: Decision):
    """[S, S]: the joint law of both texts behind the first step's tokens."""
    grants = {grant.request_id: grant for grant in decision.grants}
    drafts = [drafts_of(at, texts[at], grants.get(name)) for at, name in enumerate(IDS)]
    law = np.zeros((len(TEXTS), len(TEXTS)))
    for first, weight in drafts[0].items():
        for second, share in drafts[1].items():
            lengths = lengths_of(decision, texts, (first, second))
            own = [
                law_of_draft(method, at, texts[at], chain[:length], grants.get(IDS[at]))
                for at, (chain, length) in enumerate(zip((first, second), lengths, strict=True))
            ]
            law += weight * share * np.outer(*own)
    return law


def law_of_draft(method: str, which: int, text: Text, chain: Text, grant: Grant | None):
    if grant is not None and grant.source != "net":
        emitted = law_behind_host(behind(MODELS[which][0], text), chain)
        return as_vector(text, emitted, which)
    return laws(method, which, text, len(chain))[chain]


def table(slope: float, pass_s: float) -> CostTable:
    rows = (1, 2, 3, 4, 5, 6, 16)
    target = CostCurve(rows, tuple(1 + slope * (n - 1) for n in rows))
    passes, catch_up = CostCurve((1, 16), (pass_s, pass_s)), CostCurve((1,), (0.0,))
    return CostTable(target, drafters={"net": DrafterCost(passes, catch_up)})


def taught(
    slope: float, pass_s: float, accepted: tuple[int, ...], offers: int = 0, num_steps: int = 90
) -> Controller:
    """A controller that has seen drafts of two requests: accepted lengths in turn."""
    controller = Controller(table(slope, pass_s), DEPTH)
    requests = tuple(RequestFacts(name, 100, DEPTH, 8, network="net") for name in ("x", "y"))
    facts = StepFacts(requests)
    for step in range(num_steps):
        grants = tuple(Grant(one.request_id, "net", DEPTH, DEPTH) for one in requests)
        decision = Decision(Reason.GAIN, grants, 0.0, 2 * pass_s, 1.0, 0.0, 1.0, 3.0, 0.5)
        count = accepted[step % len(accepted)]
        drafts = tuple(
            DraftOutcome(name, DEPTH, count, (0.5 + count, 0.2 + count)) for name in ("x", "y")
        )
        shadows = (ShadowOutcome("suffix", 1 + step % 8, DEPTH, step % 3),) * (step < offers)
        target_s = 1 + 5 * slope
        controller.observe(
            StepOutcome(
                facts, decision, drafts, 6, 2 + 2 * count, 2 * pass_s, target_s, 0.0, shadows
            )
        )
    plain = Decision(Reason.PLAIN_PROBE, target_s=1.0, plain_s=1.0, tokens=2.0)
    controller.observe(StepOutcome(facts, plain, (), 2, 2, 0.0, 1 + slope, 0.0))
    controller.forget("x")
    controller.forget("y")
    return controller


def probing() -> Controller:
    """A network that did not pay is in the last step of its second probe, which may go on."""
    controller = Controller(table(0.3, 0.2), DEPTH)
    facts, num_probes = first_facts(), 0
    for _ in range(4000):
        step = controller.probe._num_steps if controller.probe.request_ids else 0
        if num_probes == 2 and step == BURST - 1:
            return controller
        decision = controller.decide(facts)
        num_probes += decision.reason is Reason.NETWORK_PROBE and step == 0
        count = int(num_probes == 2 and step == 0)
        drafts = tuple(DraftOutcome(g.request_id, 1, count, (0.5,)) for g in decision.grants)
        num_tokens = 2 + count * len(drafts)
        controller.observe(
            StepOutcome(facts, decision, drafts, 2 + len(drafts), num_tokens,
                        decision.draft_s, decision.target_s, 0.0)
        )  # fmt: skip
    raise AssertionError("no probe")


def case(controller: Controller, sources: tuple[str, str]) -> Case:
    facts = first_facts()
    decision = controller.decide(facts)
    if len(decision.grants) < 2:
        grants = tuple(Grant(name, "net", 1, 1) for name in IDS)
        decision = structs.replace(decision, grants=grants, reason=Reason.GAIN)
    return Case(controller, decision, facts, sources)


CASES = {
    "prices of networks": lambda: case(
        taught(0.61, 0.05, (0, 2, 1, 2), 0, 30), ("network", "network")
    ),
    "dear rows": lambda: case(taught(0.58, 0.02, (0, 2, 1), 0, 30), ("network", "network")),
    "a host and a network": lambda: case(taught(0.4, 0.05, (0, 1, 2), 40), ("host", "network")),
    "hosts beside networks": lambda: case(taught(0.45, 0.03, (0, 1, 2), 40), ("both", "both")),
    "probes": lambda: case(probing(), ("network", "network")),
}


def decisions(of: Case, method: str):
    """(texts of the first step, their probability, the decision that follows), one by one."""
    for first, weight in outcomes(method, 0).items():
        for second, share in outcomes(method, 1).items():
            texts = first, second
            controller = deepcopy(of.controller)
            controller.observe(outcome(of, texts))
            yield texts, weight * share, controller.decide(second_facts(of, texts))


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", RULES)
def test_two_controlled_steps_leave_the_joint_law_alone(name: str, method: str):
    of = CASES[name]()
    law = np.zeros((len(TEXTS), len(TEXTS)))
    seen = set[object]()
    for texts, weight, decision in decisions(of, method):
        seen.add(
            (decision.reason, tuple((g.request_id, g.source, g.levels) for g in decision.grants))
        )
        law += weight * second_step(method, of, texts, decision)
    plain = np.outer(*(as_vector((), {(): 1.0}, which) for which in (0, 1)))
    assert np.abs(law - plain).sum() / 2 < 1e-12
    assert len(seen) >= 2, seen  # else nothing was decided
