"""What the controller grants, and why, in single steps."""

import numpy as np
import pytest
from msgspec import structs

from outdraft.control.controller import PLAIN_BURST, Controller
from outdraft.control.corrections import WRONG_STEPS
from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.control.facts import (
    DraftOutcome,
    HostOffer,
    RequestFacts,
    ShadowOutcome,
    StepFacts,
    StepOutcome,
)
from outdraft.core.decision import Reason

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


def table(slope=0.02, pass_s=0.05, catch_up_s=0.002, **others):
    target = CostCurve(ROWS, tuple(1 + slope * (n - 1) for n in ROWS))
    passes = CostCurve((1, 64), (pass_s, 1.5 * pass_s))
    catch_up = CostCurve((1, 1000), (catch_up_s, 1000 * catch_up_s))
    return CostTable(target, drafters={"eagle3": DrafterCost(passes, catch_up)}, **others)


def request(name="a", **others):
    return RequestFacts(
        name, **{"max_tokens": 100, "max_drafts": 5, "context_tokens": 50, **others}
    )


def outcome(facts, decision, accepted=lambda grant: 0, shadows=()):
    """A step that took what was predicted."""
    drafts = tuple(DraftOutcome(g.request_id, g.levels, accepted(g)) for g in decision.grants)
    rows = len(facts.requests) + facts.prompt_rows + sum(g.rows for g in decision.grants)
    tokens = len(facts.requests) + sum(draft.accepted for draft in drafts)
    return StepOutcome(
        facts, decision, drafts, rows, tokens,
        decision.draft_s, decision.target_s, decision.host_s, shadows,
    )  # fmt: skip


def taught(controller, facts, accepted, num_steps=60):
    for _ in range(num_steps):
        controller.observe(outcome(facts, controller.decide(facts), accepted))
    return controller


def test_without_sources_nothing_is_granted():
    decision = Controller(table(), 5).decide(StepFacts((request(),)))
    assert decision.grants == ()
    assert decision.reason is Reason.NOTHING_OFFERED
    assert decision.draft_s == 0
    assert decision.step_s == decision.plain_s == pytest.approx(1.0)


@pytest.mark.parametrize("full", [{"free_slots": 0}, {"free_rows": 0}])
def test_without_room_nothing_is_granted(full):
    decision = Controller(table(), 5).decide(StepFacts((request(network="eagle3"),), **full))
    assert (decision.grants, decision.reason) == ((), Reason.NO_ROOM)


def test_a_step_of_prompts_alone_is_nobodys_draft():
    decision = Controller(table(), 5).decide(StepFacts((), prompt_rows=64))
    assert decision.grants == ()
    assert decision.target_s == pytest.approx(1 + 0.02 * 63)


@pytest.mark.parametrize("seed", range(30))
def test_grants_keep_to_what_is_allowed(seed: int):
    rng = np.random.default_rng(seed)
    controller = Controller(table(0.001, 0.01), 8)
    for _ in range(80):
        requests = tuple(
            request(
                f"r{i}",
                max_tokens=int(rng.integers(1, 12)),
                max_drafts=int(rng.integers(0, 9)),
                network="eagle3" if rng.random() < 0.7 else None,
                shapes=((), (2, 3, 1)),
                offers=(HostOffer("suffix", int(rng.integers(1, 9)), 4),) * int(rng.integers(2)),
                unread_tokens=int(rng.integers(3)),
            )
            for i in range(int(rng.integers(1, 5)))
        )
        facts = StepFacts(requests, int(rng.integers(3)) * 8, int(rng.integers(25)), 20)
        decision = controller.decide(facts)
        assert sum(grant.rows for grant in decision.grants) <= facts.max_rows
        stops = [grant.stop for grant in decision.grants if grant.stop is not None]
        assert all(one.row_cap <= facts.max_rows for one in stops if one.may_end)
        known = {one.request_id: one for one in requests}
        assert len({g.shape for g in decision.grants if g.source == "eagle3"}) <= 1
        for grant in decision.grants:
            one = known[grant.request_id]
            is_network = grant.source == one.network
            most = one.max_drafts if is_network else one.offers[0].length
            assert 1 <= grant.levels <= grant.rows <= most
            if grant.source == "suffix":
                assert grant.levels <= one.offers[0].length
            else:
                assert grant.levels < one.max_tokens
        drawn = {g.request_id: int(rng.integers(g.levels + 1)) for g in decision.grants}
        controller.observe(outcome(facts, decision, lambda g, d=drawn: d[g.request_id]))


def test_a_long_match_is_verified_where_a_short_one_is_not():
    controller = Controller(table(0.2), 5)
    short, long = (request(offers=(HostOffer("suffix", 5, n),)) for n in (1, 32))
    for match, accepted in ((1, 0), (32, 5)) * 60:
        facts = StepFacts((request(),))
        shadows = (ShadowOutcome("suffix", match, 5, accepted),)
        controller.observe(outcome(facts, controller.decide(facts), shadows=shadows))
    assert controller.decide(StepFacts((short,))).grants == ()
    (grant,) = controller.decide(StepFacts((long,))).grants
    assert (grant.levels, grant.match_length) == (5, 32)


def test_unused_offers_are_shadowed():
    controller = Controller(table(0.9), 5)
    facts = StepFacts((request(offers=(HostOffer("suffix", 5, 1),)), request("b")))
    assert controller.decide(facts).shadows == ("a",)


def test_catching_up_is_priced_by_the_tokens_that_are_left():
    facts = StepFacts((request(network="eagle3"),))
    controller = taught(Controller(table(catch_up_s=0.01), 5), facts, lambda g: g.levels)
    assert controller.decide(facts).grants
    late = request("late", network="eagle3", unread_tokens=500, max_tokens=6)
    early = request("early", network="eagle3", unread_tokens=500, max_tokens=2000)
    assert controller.decide(StepFacts((late,))).grants == ()
    decision = controller.decide(StepFacts((early,)))
    assert decision.grants
    assert decision.draft_s > decision.catch_up_s > 4.9  # part of this step all the same


def test_a_tree_is_drafted_where_rows_are_free_and_a_chain_where_they_are_dear():
    for slope, levels, shape in ((0.001, 2, (3, 3)), (0.3, 1, ())):
        controller = Controller(table(slope), 6)
        chain = controller.chances.network("eagle3", "", ())
        tree = controller.chances.network("eagle3", "", (3, 3))
        for _ in range(300):
            chain.observe([DraftOutcome("x", 1, 1)])
            chain.observe([DraftOutcome("x", 2, 0)])
            tree.observe([DraftOutcome("x", 2, 2)])
        chain.forget("x")
        tree.forget("x")
        facts = StepFacts((request(max_drafts=6, network="eagle3", shapes=((), (3, 3))),))
        (grant,) = controller.decide(facts).grants
        assert (grant.shape, grant.levels) == (shape, levels)


def test_the_stairs_of_the_target_cap_the_rows():
    stairs = CostCurve((4, 8, 16, 64), (1.0, 1.5, 3.0, 9.0), has_stairs=True)
    drafter = DrafterCost(CostCurve((1,), (0.01,)), CostCurve((1,), (0.01,)))
    controller = Controller(CostTable(stairs, drafters={"eagle3": drafter}), 5)
    names = ("a", "b", "c", "d")
    facts = StepFacts(tuple(request(name, network="eagle3") for name in names))
    easy = ("a", "b")
    taught(controller, facts, lambda g: g.levels if g.request_id in easy else 0, 200)
    decision = controller.decide(facts)
    stops = [grant.stop for grant in decision.grants if grant.stop is not None]
    assert all(one.row_cap <= 4 for one in stops if one.may_end)
    assert sum(grant.rows for grant in decision.grants) <= 4
    assert {grant.request_id for grant in decision.grants} <= set(easy)


def run(controller, facts, num_steps, accepted=lambda grant: 0, **times):
    """Steps that take what was predicted; the decisions, and which of them were held."""
    decisions, held = [], []
    for _ in range(num_steps):
        decision = controller.hold(len(facts.requests), facts.prompt_rows)
        held.append(decision is not None)
        if decision is None:
            decision = controller.decide(facts)
        told = outcome(facts, decision, accepted)
        controller.observe(structs.replace(told, is_held=held[-1], **times))
        decisions.append(decision)
    return decisions, held


@pytest.mark.parametrize(("deciding_s", "apart"), [(0.0, 1), (0.005, 1), (0.1, 10), (9.0, 32)])
@pytest.mark.parametrize("network", [None, "eagle3"])
def test_a_decision_holds_until_deciding_takes_a_hundredth_of_the_time(deciding_s, apart, network):
    controller = Controller(table(slope=0.9, pass_s=0.9), 5)  # drafts never pay
    facts = StepFacts((request(network=network),))
    run(controller, facts, 200, deciding_s=deciding_s)
    decisions, held = run(controller, facts, 64, deciding_s=deciding_s)
    if network is None or all(one.reason is Reason.NO_GAIN for one in decisions):
        assert held.count(False) == pytest.approx(64 / apart, abs=1)


def held_controller(drafts, **more):
    """One whose decision for two requests holds for some steps."""
    controller = Controller(table(0.001, 0.001) if drafts else table(0.9, 0.9), 5)
    facts = StepFacts(tuple(request(name, network="eagle3", **more) for name in "ab"))
    run(controller, facts, 100, lambda grant: grant.levels, deciding_s=0.3)
    while controller.hold(2) is not None:
        pass
    decision = controller.decide(facts)
    assert bool(decision.grants) == drafts
    return controller, decision


@pytest.mark.parametrize("drafts", [True, False])
def test_a_decision_holds_for_the_same_requests_without_prompts(drafts):
    controller, decision = held_controller(drafts)
    assert controller.hold(2) is decision
    assert controller.hold(3) is None
    assert controller.hold(2, prompt_rows=5) is None
    assert controller.hold(2) is decision
    controller.forget("a")
    assert controller.hold(2) is None


def test_sources_of_the_host_look_before_a_decision_holds():
    controller, decision = held_controller(drafts=False)
    assert controller.hold(2, may_offer=True) is None
    assert controller.hold(2) is decision


def test_sources_of_the_host_are_not_asked_while_refusals_hold():
    controller = Controller(table(0.9), 5)
    facts = StepFacts((request(offers=(HostOffer("suffix", 5, 1),)),))
    asked = 0
    for number in range(300):
        decision = controller.hold(1, may_offer=True)
        is_held = decision is not None
        if decision is None:
            decision, asked = controller.decide(facts), asked + (number >= 200)
        shadows = (ShadowOutcome("suffix", 1, 5, 0),) * len(decision.shadows)
        told = outcome(facts, decision, shadows=shadows)
        controller.observe(structs.replace(told, deciding_s=0.1, is_held=is_held))
    assert asked == pytest.approx(10, abs=1)


def test_an_offer_that_pays_makes_looks_common_again():
    controller = Controller(table(0.2), 5)
    short, long = (
        StepFacts((request(offers=(HostOffer("suffix", 5, match),)),)) for match in (1, 32)
    )
    for _ in range(60):
        decision = controller.decide(short)
        shadows = (ShadowOutcome("suffix", 1, 5, 0), ShadowOutcome("suffix", 32, 5, 5))
        controller.observe(
            structs.replace(outcome(short, decision, shadows=shadows), deciding_s=0.1)
        )
    assert controller.hold(1, may_offer=True) is not None
    assert controller.decide(long).reason is Reason.GAIN
    assert controller.hold(1, may_offer=True) is None


def test_plain_decoding_is_tried_while_drafts_pay():
    controller = Controller(table(0.001, 0.001), 5)
    facts = StepFacts((request(network="eagle3"),))
    decisions, _ = run(controller, facts, 2000, lambda grant: grant.levels)
    probes = [place for place, one in enumerate(decisions) if one.reason is Reason.PLAIN_PROBE]
    assert 2 * PLAIN_BURST <= len(probes) <= 0.02 * 2000
    assert min(probes) < 64


def test_a_network_is_due_while_its_drafts_pay_and_not_for_a_probe():
    controller = Controller(table(0.001, 0.001), 5)
    facts = StepFacts((request(network="eagle3"),))
    assert controller.network_due_in() > 0
    run(controller, facts, 60, lambda grant: grant.levels)
    assert controller.network_due_in() == 0
    run(controller, facts, 300, lambda grant: 0, draft_s=9.0)
    assert controller.network_due_in() > 0


def test_a_hard_request_is_drafted_for_at_its_own_rate_however_fast_others_were():
    controller = Controller(table(0.001, 0.2), 5)
    curve = controller.chances.network("eagle3", "", ())
    for number in range(200):
        curve.observe([DraftOutcome("easy", 5, 5)])
        curve.observe([DraftOutcome("hard", 2, number % 2)])
    easy, hard = (StepFacts((request(one, network="eagle3"),)) for one in ("easy", "hard"))
    fast = [controller.decide(easy) for _ in range(50)][-1]
    assert fast.gain > 1.4  # a token takes 0.4 of a plain step's time, and here twice that
    slow = controller.decide(hard)
    assert slow.grants
    assert 0.1 < slow.gain < 0.4


@pytest.mark.slow
def test_probes_take_a_hundredth_of_the_time():
    def share(factor: float) -> float:
        controller = Controller(table(slope=0.1), 5)
        facts = StepFacts((request(network="eagle3"),))
        lost = total = 0.0
        for number in range(20000):
            decision = controller.hold(1)
            is_held = decision is not None
            decision = decision or controller.decide(facts)
            told = structs.replace(outcome(facts, decision), is_held=is_held)
            if decision.reason is Reason.NETWORK_PROBE:
                more_s = factor * decision.step_s
                told = structs.replace(told, host_s=told.host_s + more_s - decision.step_s)
                lost += more_s - 1 if number > 2000 else 0
            total += decision.plain_s if number > 2000 else 0
            controller.observe(told)
        return lost / total

    assert 0.002 < share(1.0) < 0.012
    assert 0.002 < share(2.5) < 0.012


def test_wrong_costs_are_told_once():
    told = list[str]()
    controller = Controller(table(), 5, lambda: told.append("wrong"))
    facts = StepFacts((request(),))
    for _ in range(2 * WRONG_STEPS):
        decision = controller.decide(facts)
        controller.observe(structs.replace(outcome(facts, decision), target_s=3.0))
    assert told == ["wrong"]


def test_deciding_depends_on_finished_steps_alone():
    """Two courses that end in the same outcomes decide alike, whatever was decided between."""
    first, second = (Controller(table(0.001, 0.01), 5) for _ in range(2))
    facts = StepFacts((request(network="eagle3"),))
    for number in range(40):
        decision = first.decide(facts)
        assert second.decide(facts) == decision
        told = outcome(facts, decision, lambda grant, n=number: n % (grant.levels + 1))
        first.observe(told)
        second.observe(told)
