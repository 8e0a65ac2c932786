"""What the controller grants, and why, in single steps."""

import copy
import statistics
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from outdraft.control.answers import AGE, question
from outdraft.control.controller import SETTLED, Controller
from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.control.facts import (
    DraftOutcome,
    HostOffer,
    Reason,
    RequestFacts,
    ShadowOutcome,
    StepFacts,
    StepOutcome,
)
from outdraft.control.lessons import LONGEST, SHORTEST
from outdraft.control.looks import LONG_RUN, SLEEPY
from outdraft.control.standing import MAX_STEPS, Standing

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
                lag_tokens=int(rng.integers(3)),
            )
            for i in range(int(rng.integers(1, 5)))
        )
        facts = StepFacts(requests, int(rng.integers(3)) * 8, int(rng.integers(25)), 20)
        decision = controller.decide(facts)
        assert sum(grant.rows for grant in decision.grants) <= facts.max_rows
        assert decision.row_cap <= facts.max_rows
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
    late = request("late", network="eagle3", lag_tokens=500, max_tokens=6)
    early = request("early", network="eagle3", lag_tokens=500, max_tokens=2000)
    assert controller.decide(StepFacts((late,))).grants == ()
    decision = controller.decide(StepFacts((early,)))
    assert decision.grants
    assert decision.draft_s > decision.catch_up_s > 4.9  # part of this step all the same
    assert decision.held_step_s == pytest.approx(decision.step_s - decision.catch_up_s)


def test_a_tree_is_drafted_where_rows_are_free_and_a_chain_where_they_are_dear():
    for slope, levels, shape in ((0.001, 2, (3, 3)), (0.3, 1, ())):
        controller = Controller(table(slope), 6)
        chain = controller.estimates.network("eagle3", "", ())
        tree = controller.estimates.network("eagle3", "", (3, 3))
        for _ in range(300):
            chain.observe(DraftOutcome("x", 1, 1))
            chain.observe(DraftOutcome("x", 2, 0))
            tree.observe(DraftOutcome("x", 2, 2))
        chain.forget("x")
        tree.forget("x")
        facts = StepFacts((request(max_drafts=6, network="eagle3", shapes=((), (3, 3))),))
        (grant,) = controller.decide(facts).grants
        assert (grant.shape, grant.levels) == (shape, levels)


def test_the_host_is_asked_less_often_while_its_offers_are_refused():
    controller = Controller(table(0.9, offer_s=0.05), 5)
    facts = StepFacts((request(offers=(HostOffer("suffix", 5, 1),)),))
    asked = 0
    for step in range(3 * SLEEPY):
        asked += controller.wants_offers and step >= 2 * SLEEPY
        now = facts if controller.wants_offers else StepFacts((request(),))
        decision = controller.decide(now)
        shadows = (ShadowOutcome("suffix", 1, 5, 0),) * len(decision.shadows)
        if now is facts:
            controller.looked(decision.step_s, 0)
        controller.observe(outcome(now, decision, shadows=shadows))
    assert 0 < asked <= SLEEPY // 4


def test_the_stairs_of_the_target_cap_the_rows():
    stairs = CostCurve((4, 8, 16, 64), (1.0, 1.5, 3.0, 9.0), has_stairs=True)
    drafter = DrafterCost(CostCurve((1,), (0.01,)), CostCurve((1,), (0.01,)))
    controller = Controller(CostTable(stairs, drafters={"eagle3": drafter}), 5)
    names = ("a", "b", "c", "d")
    facts = StepFacts(tuple(request(name, network="eagle3") for name in names))
    easy = ("a", "b")
    taught(controller, facts, lambda g: g.levels if g.request_id in easy else 0, 200)
    decision = controller.decide(facts)
    assert decision.row_cap <= 4
    assert {grant.request_id for grant in decision.grants} <= set(easy)


def test_drafts_of_the_largest_step_teach_by_turn():
    controller = Controller(table(0.001), 3)
    facts = StepFacts(tuple(request(f"r{i}", network="eagle3") for i in range(20)))
    taught(controller, facts, lambda g: g.levels * (g.request_id == "r13"), 60)
    curve = controller.estimates.network("eagle3", "", ())
    assert curve.survivals("r13", 1)[0] > curve.survivals("r12", 1)[0]


POOR = {"slope": 0.9, "pass_s": 0.9}  # drafts never pay


def plain_steps(controller, facts, num_steps):
    """How many steps are held; the others are decided and observed."""
    num_held = 0
    for _ in range(num_steps):
        if controller.try_hold(len(facts.requests), facts.prompt_rows):
            num_held += 1
            assert controller.standing.grants == controller.standing.shadows == ()
        else:
            controller.observe(outcome(facts, controller.decide(facts)))
    return num_held


@pytest.mark.parametrize("network", [None, "eagle3"])
def test_plain_steps_are_held_while_nothing_changes(network):
    controller = Controller(table(**POOR), 5)
    facts = StepFacts((request(network=network),))
    plain_steps(controller, facts, 100)
    assert plain_steps(controller, facts, 1000) >= 900


def test_where_deciding_takes_no_time_a_step_that_drafts_is_never_held():
    controller = Controller(table(0.001, 0.001), 5)
    facts = StepFacts((request(network="eagle3"),))
    taught(controller, facts, lambda g: g.levels)
    assert plain_steps(controller, facts, 200) <= 5 * MAX_STEPS // 2  # behind measured plain steps
    assert controller.decide(facts).grants


def dear(facts, decision, deciding_s, accepted=lambda grant: grant.levels):
    return replace(outcome(facts, decision, accepted), deciding_s=deciding_s)


def lessons_of(controller, facts, deciding_s, num_steps):
    """Numbers of the steps that drafted and were learned from; the others were held."""
    lessons = []
    for step in range(num_steps):
        if controller.try_hold(len(facts.requests)):
            decision, is_held = controller.standing, True
            if not decision.grants and controller.wants_plain_time:
                controller.observe_plain(len(facts.requests), 0, decision.target_s, decision.host_s)
        else:
            decision, is_held = controller.decide(facts), False
        told = dear(facts, decision, deciding_s)
        if controller.wants_outcome:
            lessons += [step] * bool(decision.grants)
            controller.observe(replace(told, is_held=is_held))
        if controller.is_passing:
            controller.pass_by(told.num_tokens, told.draft_s, told.host_s, decision.step_s)
    return lessons


@pytest.mark.parametrize(("deciding_s", "apart"), [(0.005, 1), (0.06, 6), (1.0, LONGEST)])
def test_lessons_take_a_hundredth_of_the_time_once_enough_of_them_went_by(deciding_s, apart):
    controller = Controller(table(0.001, 0.001), 5)
    facts = StepFacts((request(network="eagle3"),))
    lessons = lessons_of(controller, facts, deciding_s, 2000)
    assert lessons[:2] == [0, min(apart, 2 * SHORTEST)]
    assert statistics.median(np.diff(lessons[-20:])) == apart


def drafting_dear(controller, facts):
    """Let the controller begin to hold a decision to draft for these facts."""
    lessons_of(controller, facts, 1.0, 1000)
    decision = None
    while decision is None or not decision.grants:
        while controller.try_hold(len(facts.requests)):
            pass
        decision = controller.decide(facts)
        if controller.wants_outcome:
            controller.observe(dear(facts, decision, 1.0))
    return decision


def test_a_decision_to_draft_holds_for_the_same_batch_without_prompts():
    controller = Controller(table(0.001, 0.001), 5)
    facts = StepFacts(tuple(request(f"r{i}", network="eagle3") for i in range(16)))
    drafting_dear(controller, facts)
    assert not controller.try_hold(15)
    assert not controller.try_hold(16, prompt_rows=1)
    assert controller.try_hold(16)


def stepped(controller, facts, deciding_s):
    """Whether the step was held, its decision, and what was wanted behind it."""
    wants_offers = controller.wants_offers
    is_held = controller.try_hold(len(facts.requests))
    decision = controller.standing if is_held else controller.decide(facts)
    if is_held and not decision.grants and controller.wants_plain_time:
        controller.observe_plain(len(facts.requests), 50, decision.target_s, decision.host_s)
    if controller.wants_outcome:
        over = replace(outcome(facts, decision), is_held=is_held, deciding_s=deciding_s)
        controller.observe(over)
    return (
        is_held,
        decision,
        wants_offers,
        controller.wants_plain_time,
        controller.network_due_in(1),
    )


@pytest.mark.parametrize("deciding_s", [0.001, 1.0])
@pytest.mark.parametrize("pass_s", [0.2, 2.0])
def test_a_rest_leaves_behind_what_as_many_held_steps_leave(deciding_s, pass_s):
    """`quiet_steps` are held, none of them is timed or looked into, and nothing else counts."""
    controller = Controller(table(0.1, pass_s), 5)
    facts = StepFacts(tuple(request(f"r{i}", network="eagle3") for i in range(3)))
    offered = tuple(replace(one, offers=(HostOffer("suffix", 2, 2),)) for one in facts.requests)
    num_quiet = set[int]()
    for number in range(200):
        looks = number % 2 == 0
        is_held, decision, *_ = stepped(controller, facts, deciding_s)
        if not is_held and controller.wants_offers:
            refused = replace(facts, requests=offered)  # so that looks become rarer
            controller.observe(outcome(refused, controller.decide(refused)))
        if not is_held or decision.grants:
            continue
        resting, quiet = copy.deepcopy(controller), controller.quiet_steps(may_find=looks)
        num_quiet.add(quiet)
        for _ in range(quiet):
            resting.rest()
            was_held, same, wants_offers, wants_time, _ = stepped(controller, facts, deciding_s)
            assert was_held
            assert same is decision
            assert not wants_time
            assert not (looks and wants_offers)
        copied = copy.deepcopy(controller)
        for _ in range(10):
            of_rest, of_steps = (stepped(one, facts, deciding_s) for one in (resting, copied))
            assert of_rest == of_steps
    assert min(num_quiet) == 0
    assert len(num_quiet) > 3


def test_who_comes_in_the_place_of_a_request_that_ended_drafts_as_a_newcomer():
    controller = Controller(table(0.001, 0.001), 5)
    ids = [f"r{i}" for i in range(4)]
    facts = StepFacts(tuple(request(one, network="eagle3") for one in ids))
    decision = drafting_dear(controller, facts)
    controller.forget("r1")
    assert not controller.try_hold(3)  # nobody came: another batch
    assert controller.try_hold(3, prompt_rows=7)  # somebody's prompt is read
    assert not controller.is_passing
    assert not controller.wants_outcome
    assert controller.standing_for(["r0", "r2", "r3"]) is decision
    assert controller.try_hold(4)
    renamed = controller.standing_for(["r0", "r2", "r3", "new"])
    (new,) = [grant for grant in renamed.grants if grant.request_id == "new"]
    unknown = controller.estimates.network("eagle3", "", ()).survivals("", new.levels)
    assert new.expected_tokens == pytest.approx(sum(unknown))
    assert 0 < new.levels <= max(grant.levels for grant in decision.grants)
    others = [grant for grant in decision.grants if grant.request_id != "r1"]
    assert [grant for grant in renamed.grants if grant is not new] == others
    assert controller.standing is renamed
    assert controller.standing_for(["r0", "r2", "r3", "new"]) is renamed
    for gone in ("r0", "r2", "r3"):
        assert controller.try_hold(4)
        controller.forget(gone)
    assert not controller.try_hold(4)  # all have ended


def lose(controller, facts, accepted=lambda grant: grant.levels):
    """Draft until the guard is alarmed: lessons look as good as ever, but all other steps take
    twice their time, and bring nothing."""
    for _ in range(500):
        is_held = controller.try_hold(1)
        decision = controller.standing if is_held else controller.decide(facts)
        if controller.wants_outcome:
            controller.observe(replace(dear(facts, decision, 1.0, accepted), is_held=is_held))
        if controller.is_passing:
            controller.pass_by(1, 2 * decision.draft_s, decision.host_s, 2 * decision.step_s)
        if decision.reason is Reason.PATIENCE:
            return
    raise AssertionError("nobody noticed")


def test_held_steps_that_lose_raise_the_alarm_of_the_guard():
    controller = Controller(table(0.001, 0.001), 5)
    facts = StepFacts((request(network="eagle3"),))
    drafting_dear(controller, facts)
    lose(controller, facts)
    assert controller.decide(facts).reason is Reason.PATIENCE


def test_good_evidence_ends_the_patience():
    """It comes from the drafts of others; those that wait bring none."""
    controller = Controller(table(0.001, 0.001), 5)
    facts = StepFacts((request(network="eagle3"),))
    lessons_of(controller, facts, 1.0, 100)
    lose(controller, facts, lambda grant: min(grant.levels, 1))
    guard, curve = controller._regime(1).guard, controller.estimates.network("eagle3", "", ())
    assert controller.decide(facts).reason is Reason.PATIENCE
    for _ in range(300):
        curve.observe(DraftOutcome("others", 5, 5))
    assert guard.waiting > 20
    assert controller.decide(StepFacts((request("b", network="eagle3"),))).reason is Reason.GAIN
    assert guard.waiting == 0


def test_a_held_step_counts_as_twice_its_prediction_at_most_without_catching_up():
    controller = Controller(table(0.001, 0.001), 5)
    facts = StepFacts((request(network="eagle3"),))
    decision = drafting_dear(controller, facts)
    held = Standing(replace(decision, draft_s=decision.draft_s + 9, catch_up_s=9), 1, False)
    held.passed = [(6, decision.step_s, ()), (6, 100.0, ())]
    assert held.take_passed().seconds == pytest.approx(3 * decision.step_s)


@pytest.mark.parametrize("ends", [False, True])
def test_drafts_of_held_steps_teach_before_the_next_decision_or_their_requests_end(ends):
    controller = Controller(table(0.001, 0.001), 5)
    facts = StepFacts((request(network="eagle3"),))
    held = drafting_dear(controller, facts)
    before = controller.estimates.network("eagle3", "", ()).chances[0]
    for step in range(20):
        assert controller.try_hold(1)
        # As many tokens as predicted, so that the decision is not looked at again.
        num_tokens = int(held.tokens * (step + 1)) - int(held.tokens * step)
        controller.pass_by(
            num_tokens, held.draft_s, held.host_s, held.step_s, [("a", held.grants[0].levels, 0)]
        )
    assert controller.estimates.network("eagle3", "", ()).chances[0] == before
    if ends:
        controller.forget("a")
    else:
        controller.decide(facts)
    assert controller.estimates.network("eagle3", "", ()).chances[0] < before - 0.1


def held_steps(controller, request_ids, accepted, num_steps):
    """Decisions of steps that are held, as long as they are; `accepted`: levels, of a grant."""
    decisions = []
    while len(decisions) < num_steps and controller.try_hold(len(request_ids)):
        decision = controller.standing_for(request_ids)
        decisions.append(decision)
        fates = [(one.request_id, one.levels, accepted(one)) for one in decision.grants]
        num_tokens = len(request_ids) + sum(done for *_, done in fates)
        controller.pass_by(
            num_tokens, decision.draft_s, decision.host_s, decision.held_step_s, fates
        )
    return decisions


def moderately_good(num_requests=1, pass_s=0.1):
    """A controller that drafts a little for requests that may be better or worse."""
    controller = Controller(table(0.05, pass_s), 8)
    facts = StepFacts(tuple(request(f"r{i}", network="eagle3") for i in range(num_requests)))
    curve = controller.estimates.network("eagle3", "", ())
    for number in range(600):
        accepted = (3, 3, 1, 3, 0, 2) if number // 30 % 2 else (1, 0, 0, 2, 0, 0)
        curve.observe(DraftOutcome(f"old {number // 30}", 3, accepted[number % 6]))
        if number % 30 == 29:
            curve.forget(f"old {number // 30}")
    for _ in range(8):
        controller.decide(facts)
        controller.observe(dear(facts, controller.decide(facts), 1.0, lambda grant: 2))
    for one in facts.requests:
        controller.forget(one.request_id)
    return controller, facts


def test_a_decision_that_fares_as_predicted_goes_on():
    controller, facts = moderately_good()
    decision = controller.decide(facts)
    expected, total = decision.tokens - 1, iter(range(1000))

    def accepted(grant):
        step = next(total)
        return int(expected * (step + 1)) - int(expected * step)

    decisions = held_steps(controller, ["r0"], accepted, 28)
    assert len(decisions) == 28
    assert all(one is decision for one in decisions)


def test_drafts_get_longer_for_a_request_that_is_easier_than_others():
    controller, facts = moderately_good()
    first = controller.decide(facts).grants[0].levels
    lengths = [
        one.grants[0].levels for one in held_steps(controller, ["r0"], lambda one: one.levels, 28)
    ]
    assert lengths[:4] == [first] * 4
    assert len(lengths) == 28
    assert min(lengths[4:]) > first


def test_drafts_end_early_for_a_request_that_is_harder_than_others():
    controller, facts = moderately_good(pass_s=0.25)
    first = controller.decide(facts).grants[0].levels
    decisions = held_steps(controller, ["r0"], lambda one: 0, 28)
    assert 4 <= len(decisions) < 13
    assert all(one.grants[0].levels <= first for one in decisions)
    while (decision := controller.decide(facts)).reason is not Reason.NO_GAIN:
        assert len(decisions) < 40
        decisions.append(decision)
        if decision.grants:
            controller.observe(dear(facts, decision, 1.0, lambda grant: 0))
        decisions += held_steps(controller, ["r0"], lambda one: 0, 28)
    other = controller.decide(StepFacts((request("r1", network="eagle3"),)))
    assert other.reason in (Reason.GAIN, Reason.PLAIN_PROBE)  # drafts pay for others


def test_requests_of_one_decision_part_when_they_fare_differently():
    controller, facts = moderately_good(3)
    first = {one.request_id: one.levels for one in controller.decide(facts).grants}
    assert first["r0"] == first["r1"] == first["r2"]
    decisions = held_steps(
        controller, list(first), lambda one: one.levels if one.request_id != "r2" else 0, 28
    )
    last = {one.request_id: one.levels for one in decisions[-1].grants}
    assert last["r0"] > first["r0"]
    assert last.get("r2", 0) < first["r2"]


def test_a_decision_without_anyone_left_who_drafts_ends_without_a_lesson():
    controller = Controller(table(0.001, 0.001), 5)
    facts = StepFacts(tuple(request(one, network="eagle3") for one in ("r0", "r1")))
    decision = drafting_dear(controller, facts)
    held = controller._held
    held.decision = replace(decision, grants=decision.grants[:1])  # `r1` was too hard
    held.newcomer = None
    controller.forget("r0")
    assert controller.try_hold(2)
    assert controller.standing_for(["new", "r1"]).grants == ()
    assert not controller.is_passing
    assert not controller.try_hold(2)


@pytest.mark.parametrize("deciding_s", [0.07, 0.1, 0.3])
def test_held_steps_tell_what_drafts_take_however_long_decisions_hold(deciding_s):
    controller = Controller(table(0.01, 0.1), 5)
    facts = StepFacts((request(network="eagle3"),))
    for _ in range(600):
        is_held = controller.try_hold(1)
        decision = controller.standing if is_held else controller.decide(facts)
        told = dear(facts, decision, deciding_s)
        slow = replace(told, draft_s=2.5 * 0.1 * len(decision.grants) * 5, is_held=is_held)
        if controller.wants_outcome:
            controller.observe(slow)
        if controller.is_passing:
            step_s = slow.draft_s + slow.target_s + slow.host_s
            controller.pass_by(slow.num_tokens, slow.draft_s, slow.host_s, step_s)
    levels = decision.grants[0].levels if decision.grants else 5
    assert drafter_factor(controller) > 2.0 * 5 / levels


def test_what_the_host_takes_in_held_steps_is_learned():
    controller = Controller(table(0.001, 0.001, host_s=0.1), 5)
    facts = StepFacts((request(network="eagle3"),))
    for _ in range(4):
        held = drafting_dear(controller, facts)
        while controller.try_hold(1):
            controller.pass_by(4, held.draft_s, 0.4, held.step_s)
    # Lessons between them say 0.1 or so.
    assert controller.costs.drafting_s(1) > 0.05


def test_another_number_of_requests_or_prompt_rows_is_decided_anew():
    controller = Controller(table(**POOR), 5)
    eight = StepFacts(tuple(request(f"r{i}") for i in range(8)))
    assert not controller.try_hold(8)
    plain_steps(controller, eight, SETTLED)
    assert controller.try_hold(8)
    assert controller.try_hold(7)
    assert not controller.try_hold(6)
    assert not controller.try_hold(1)
    assert not controller.try_hold(8, prompt_rows=64)
    assert controller.try_hold(8)


def test_nothing_is_held_when_all_requests_may_have_changed():
    for count in (1, 4, 32):
        controller = Controller(table(**POOR), 5)
        facts = StepFacts(tuple(request(f"r{i}") for i in range(count)))
        plain_steps(controller, facts, SETTLED)
        for i in range(count // 2):
            controller.forget(f"r{i}")
        assert controller.try_hold(count)
        for i in range(count // 2, count):
            controller.forget(f"r{i}")
        assert not controller.try_hold(count)


def test_probes_of_a_network_come_as_often_in_held_steps():
    probes = []
    for is_held in (True, False):
        controller = Controller(table(**POOR), 5)
        facts = StepFacts((request(network="eagle3"),))
        num = 0
        for _ in range(4000):
            if is_held and controller.try_hold(1):
                continue
            decision = controller.decide(facts)
            num += decision.reason is Reason.NETWORK_PROBE
            controller.observe(outcome(facts, decision))
        probes.append(num)
    assert probes[0] == pytest.approx(probes[1], rel=0.1)
    assert probes[0] >= 16


def test_keeping_states_for_a_probe_is_a_part_of_what_it_loses():
    """In each step that keeps them it takes half a plain step, of which probes may lose a
    hundredth."""

    def intervals(keep_s: float) -> tuple[int, int]:
        """Steps between two probes, and in how many of them states are kept."""
        controller, facts = Controller(table(**POOR), 5), StepFacts((request(network="eagle3"),))
        probes, kept = list[int](), list[int]()
        for step in range(9000):
            decision = controller.decide(facts)
            if not decision.grants and controller.network_due_in(1) <= 16:
                kept.append(step)
                controller.observe_keeping(keep_s)
            elif decision.reason is Reason.NETWORK_PROBE:
                probes.append(step)
            controller.observe(outcome(facts, decision))
        last = [step for step in probes if step < probes[-1] - 100][-1]
        assert controller.probe.interval is not None
        return controller.probe.interval, sum(last < step < probes[-1] for step in kept)

    (free, _), (dear, num_kept) = intervals(0.0), intervals(0.5)
    assert num_kept >= 16
    assert dear == pytest.approx(free + 0.5 * num_kept / 0.01, rel=0.02)


def test_a_network_reads_prompts_while_its_drafts_pay_and_not_for_a_probe():
    facts = StepFacts((request(network="eagle3"),))
    poor, reasons = Controller(table(**POOR), 5), set[Reason]()
    for _ in range(300):
        decision = poor.decide(facts)
        poor.observe(outcome(facts, decision))
        reasons.add(decision.reason)
        assert poor.network_due_in(1) > 0 or decision.reason is Reason.GAIN
    assert Reason.NETWORK_PROBE in reasons
    good = Controller(table(), 5)
    assert good.network_due_in(1) > 0
    taught(good, facts, lambda grant: grant.levels, 30)
    assert good.network_due_in(1) == 0


def test_shadows_of_held_steps_teach():
    controller = Controller(table(), 5)
    before = controller.estimates.host("suffix").survivals(4, 3)
    controller.observe_shadows((ShadowOutcome("suffix", 4, 3, 0),) * 20)
    assert controller.estimates.host("suffix").survivals(4, 3) < before


def test_drafts_of_the_host_teach_in_steps_that_are_no_lessons():
    controller = Controller(table(0.001), 5)
    asked(controller, offered(), 0.2, 300)
    decision, before = controller.decide(offered()), survival_of_an_offer(controller)
    assert controller.is_passing
    for _ in range(40):
        controller.pass_by(1, 0.0, 0.0, decision.step_s, [("a", 3, 0)])
    assert survival_of_an_offer(controller) == before  # nobody has asked yet
    controller.decide(offered())
    assert survival_of_an_offer(controller) < 0.8 * before


def survival_of_an_offer(controller):
    return controller.estimates.host("suffix").survivals(4, 3)[0]


def test_plain_decoding_is_tried_while_offers_are_answered():
    controller = Controller(table(0.001), 5)
    decisions, _ = asked(controller, offered(), 0.2, 2000)
    reasons = [decision.reason for decision in decisions]
    assert reasons.count(Reason.PLAIN_PROBE) >= 2
    assert reasons.count(Reason.GAIN) > 1500


ONE_TOKEN = 1  # is all that is offered, and it is always right


def poor_looks(controller, num_steps):
    """Steps with looks that take as long as two plain ones; how many steps looked."""
    num_looks = 0
    for _ in range(num_steps):
        looks = controller.wants_offers
        if not looks and controller.try_hold(1):
            continue
        facts = offered(ONE_TOKEN) if looks else StepFacts((request(),))
        decision = controller.decide(facts)
        told = dear(facts, decision, 0.2)
        if controller.wants_outcome:
            controller.observe(told)
        if controller.is_passing:
            controller.pass_by(told.num_tokens, told.draft_s, told.host_s, decision.step_s)
        if looks:
            controller.looked(2 * decision.plain_s, 0)
        num_looks += looks
    return num_looks


def test_looks_that_take_longer_than_their_drafts_win_become_rare():
    controller = Controller(table(0.001), 5)
    assert poor_looks(controller, LONG_RUN) > 0.9 * LONG_RUN
    poor_looks(controller, LONG_RUN // 4)
    assert 400 // 40 <= poor_looks(controller, 400) <= 400 // 10


@pytest.mark.parametrize("decided_with", [8, 0], ids=["known", "begun since"])
def test_looks_beside_prompts_are_not_judged_but_what_they_cost_is_known(decided_with):
    controller = Controller(table(0.9, offer_s=0.05), 5)
    for _ in range(2 * LONG_RUN):
        decision = controller.decide(StepFacts((request(),), prompt_rows=decided_with))
        controller.looked(5 * decision.plain_s, 8)
    assert controller.wants_offers
    offer = StepFacts((request(offers=(HostOffer("suffix", 5, 1),)),))
    for _ in range(2 * SLEEPY):
        controller.observe(outcome(offer, controller.decide(offer)))
        controller.looked(5.0, 8)
    asked_for = 0
    for _ in range(40):
        asked_for += controller.wants_offers
        controller.decide(StepFacts((request(),)))
    assert asked_for < 20


def with_rare_looks():
    """A controller with a plain decision that stands, and what stands for an offer now."""
    controller = Controller(table(0.001), 5)
    poor_looks(controller, 2 * LONG_RUN)
    assert controller._looks.are_rare
    assert controller.decide(StepFacts((request(),))).reason is Reason.NOTHING_OFFERED
    decision = controller.decide(offered(ONE_TOKEN))
    assert decision.reason is Reason.GAIN
    return controller, decision


def test_where_looks_are_rare_plain_decoding_goes_on_behind_a_draft_of_the_host():
    controller, _ = with_rare_looks()
    assert controller.try_hold(1)
    assert controller.standing.grants == ()


def test_where_looks_are_common_it_is_decided_anew():
    controller = Controller(table(0.001), 5)
    for _ in range(SETTLED):
        controller.decide(StepFacts((request(),)))
    assert controller.try_hold(1)
    assert controller.decide(offered(ONE_TOKEN)).reason is Reason.GAIN
    assert not controller.try_hold(1)


def test_what_a_draft_of_the_host_showed_is_learned_where_plain_decoding_goes_on():
    controller, decision = with_rare_looks()
    before = survival_of_an_offer(controller)
    assert controller.is_passing
    controller.pass_by(1, 0.0, 0.0, decision.step_s, [("a", 1, 0)] * 200)
    assert controller.try_hold(1)
    assert survival_of_an_offer(controller) < 0.8 * before


def offered(length=3, match_length=4, name="a", **others):
    return StepFacts(
        (request(name, offers=(HostOffer("suffix", length, match_length),), **others),)
    )


def asked(controller, facts, deciding_s, num_steps):
    """Decisions, and which of them were learned from; measured plain steps are held."""
    decisions, lessons = [], []
    for _ in range(num_steps):
        if not controller.wants_offers and controller.try_hold(1):
            continue
        decisions.append(controller.decide(facts))
        lessons.append(controller.wants_outcome)
        told = dear(facts, decisions[-1], deciding_s)
        if controller.wants_outcome:
            controller.observe(told)
        if controller.is_passing:
            controller.pass_by(told.num_tokens, told.draft_s, told.host_s, decisions[-1].step_s)
    return decisions, lessons


def test_an_offer_like_an_earlier_one_is_answered_alike_where_deciding_is_dear():
    controller = Controller(table(0.001), 5)
    _, lessons = asked(controller, offered(), 0.2, 300)
    assert sum(lessons) < 150
    decision = controller.decide(offered())
    assert controller.decide(offered(match_length=5)) is decision  # of one bucket
    assert controller.decide(offered(match_length=9)) is not decision
    assert controller.decide(offered(length=2)) is not decision
    assert controller.decide(offered(context_tokens=500)) is not decision


def test_an_answer_holds_for_other_requests_and_names_them_unless_a_network_knows_them():
    controller = Controller(table(0.001), 5)
    asked(controller, offered(), 0.2, 300)
    decision, found = controller.decide(offered()), controller.decide(offered(name="b"))
    (grant,) = decision.grants
    assert found == replace(decision, grants=(replace(grant, request_id="b"),))
    assert controller.decide(offered(name="b")) is found
    known, other = offered(network="eagle3"), offered(network="eagle3", name="b")
    for is_known in (lambda request: False, lambda request: True):
        same = offered(network="eagle3", max_tokens=99)
        assert question(known, is_known) == question(same, is_known)
    assert question(known, lambda request: False) == question(other, lambda request: False)
    assert question(known, lambda request: True) != question(other, lambda request: True)
    assert not controller.estimates.is_known(known.requests[0])
    controller.estimates.network("eagle3", "", ()).observe(DraftOutcome("a", 2, 1))
    assert controller.estimates.is_known(known.requests[0])
    assert not controller.estimates.is_known(other.requests[0])


def test_plain_decoding_goes_on_for_whoever_comes_while_nothing_is_learned():
    controller = Controller(table(0.2, 0.4), 5)
    curve = controller.estimates.network("eagle3", "", ())
    for number in range(600):
        curve.observe(DraftOutcome(str(number), 1, 0))
    decisions = []
    for number in range(200):
        facts = StepFacts((request(f"r{number // 20}", network="eagle3", lag_tokens=9),))
        decision = controller.standing if controller.try_hold(1) else controller.decide(facts)
        decisions.append(decision)
        if number % 20 == 19:
            controller.forget(f"r{number // 20}")
    plain = [one for one in decisions if one.reason is Reason.NO_GAIN]
    assert len(plain) > 180
    # One at the beginning, and one or two behind each probe.
    assert len({id(one) for one in plain}) <= 8


def test_an_answer_is_given_for_so_many_steps_and_then_thought_over():
    controller = Controller(table(0.001), 5)
    asked(controller, offered(), 0.2, 300)
    decisions = [controller.decide(offered()) for _ in range(4 * AGE)]
    kept = [one.reason is Reason.GAIN for one in decisions]
    changes = [
        step
        for step in range(1, 4 * AGE)
        if decisions[step] is not decisions[step - 1] and kept[step] and kept[step - 1]
    ]
    assert len(changes) >= 2
    assert all(later - step == AGE for step, later in pairwise(changes))


def refusing():
    """A controller that has learned, where deciding is dear, that offers are never accepted."""
    controller = Controller(table(0.1), 5)
    controller.observe_shadows((ShadowOutcome("suffix", 4, 3, 0),) * 400)
    for _ in range(AGE):
        decision = controller.decide(offered())
        if controller.wants_outcome:
            controller.observe(dear(offered(), decision, 0.2, lambda grant: 0))
    return controller


def test_offers_that_are_refused_again_are_neither_decided_anew_nor_lessons():
    controller = refusing()
    seen = {id(controller.decide(offered()))}
    for _ in range(AGE // 2):
        decision = controller.decide(offered())
        assert decision.reason is Reason.NO_GAIN
        assert decision.shadows
        assert controller.wants_outcome == (id(decision) not in seen)
        seen.add(id(decision))
    assert len(seen) <= 2


def test_offers_that_became_right_are_taken_when_the_answer_that_refused_them_is_old():
    controller = refusing()
    assert controller.decide(offered()).reason is Reason.NO_GAIN
    controller.observe_shadows((ShadowOutcome("suffix", 4, 3, 3),) * 400)
    reasons = [controller.decide(offered()).reason for _ in range(AGE + 1)]
    assert Reason.GAIN in reasons


def test_an_answer_that_refuses_offers_does_not_end_a_probe_of_the_network_or_keep_it_waiting():
    controller = Controller(table(0.1), 5)
    controller.observe_shadows((ShadowOutcome("suffix", 4, 3, 0),) * 400)
    facts = StepFacts((request(network="eagle3", offers=(HostOffer("suffix", 3, 4),)),))
    num_probes = num_answers = 0
    seen = set()
    for _ in range(3000):
        goes_on, was_due = bool(controller.probe.request_ids), controller.probe.due_in == 0
        decision = controller.decide(facts)
        is_probe = decision.reason is Reason.NETWORK_PROBE
        assert is_probe or not goes_on
        assert not was_due or id(decision) not in seen
        num_probes += is_probe
        num_answers += id(decision) in seen
        seen = {id(decision)}
        if controller.wants_outcome:
            controller.observe(dear(facts, decision, 0.2, lambda grant: 0))
    assert num_probes > 8
    assert num_answers > 1000


def test_where_deciding_takes_no_time_each_offer_is_decided_and_learned_from():
    controller = Controller(table(0.001), 5)
    decisions, lessons = asked(controller, offered(), 0.0, 100)
    assert all(lessons)
    assert len({id(one) for one in decisions}) == len(decisions) > 50


def drafter_factor(controller):
    return controller.costs.pass_N("eagle3", 2, 0)[1] / 0.05


@pytest.mark.parametrize("deciding_s", [0.0, 0.2])
def test_a_network_that_is_off_gets_its_costs_from_probes_without_what_deciding_adds(deciding_s):
    slower = 1.4 if deciding_s else 1.0
    controller = Controller(table(slope=0.1), 5)
    facts = StepFacts((request(network="eagle3"),))
    for _ in range(4000):
        if controller.try_hold(1):
            if controller.wants_plain_time:
                controller.observe_plain(1, 0, 1.0, 0.0)
            continue
        decision = controller.decide(facts)
        told = dear(facts, decision, deciding_s, lambda grant: 0)
        controller.observe(
            replace(
                told,
                draft_s=0.05 * sum(grant.levels for grant in decision.grants) * slower,
                target_s=(1 + 0.1 * (told.num_rows - 1)) * slower,
            )
        )
    assert drafter_factor(controller) == pytest.approx(1.0, rel=0.12)


def test_where_decisions_never_hold_some_of_the_decided_steps_are_lessons():
    controller = Controller(table(0.001, 0.001), 5)
    facts = StepFacts((request(network="eagle3"),))
    drafting_dear(controller, facts)
    lessons = decided = 0
    for number in range(400):  # each request ends behind a step
        one = StepFacts((request(f"r{number}", network="eagle3"),))
        decision = controller.decide(one)
        decided += bool(decision.grants)
        if decision.grants and controller.wants_outcome:
            lessons += 1
        if controller.wants_outcome:
            controller.observe(dear(one, decision, 1.0))
        controller.forget(f"r{number}")
    assert decided > 200
    assert decided / 10 < lessons < decided / 2


def test_steps_that_are_no_lessons_tell_what_drafts_take():
    # Margins are told in lessons, which makes them longer.
    controller = Controller(table(0.001, 0.05), 5)
    facts = StepFacts((request(network="eagle3"),))
    for _ in range(3000):
        is_held = controller.try_hold(1)
        decision = controller.standing if is_held else controller.decide(facts)
        draft_s = 0.05 * sum(grant.levels for grant in decision.grants)
        told = replace(dear(facts, decision, 0.5), draft_s=1.5 * draft_s, is_held=is_held)
        if controller.wants_outcome:
            controller.observe(told)
        elif controller.is_passing:
            step_s = draft_s + told.target_s + told.host_s
            controller.pass_by(told.num_tokens, draft_s, told.host_s, step_s)
    assert drafter_factor(controller) == pytest.approx(1.0, rel=0.05)


def test_a_hard_request_is_drafted_for_at_its_own_rate_however_fast_others_were():
    controller = Controller(table(0.001, 0.2), 5)
    curve = controller.estimates.network("eagle3", "", ())
    for number in range(200):
        curve.observe(DraftOutcome("easy", 5, 5))
        curve.observe(DraftOutcome("hard", 2, number % 2))
    easy, hard = (StepFacts((request(one, network="eagle3"),)) for one in ("easy", "hard"))
    fast = [controller.decide(easy) for _ in range(50)][-1]
    assert fast.gain > 1.5  # a token takes 0.4 of a plain step's time, and here twice that
    slow = controller.decide(hard)
    assert slow.grants
    assert 0.1 < slow.gain < 0.4


def test_a_network_goes_on_reading_prompts_where_a_hard_request_is_not_drafted_for():
    controller = Controller(table(0.1, 0.3), 5)
    curve = controller.estimates.network("eagle3", "", ())
    hard = StepFacts((request("hard", network="eagle3"),))
    for number in range(100):
        curve.observe(DraftOutcome(f"easy {number % 5}", 5, 5))
        curve.observe(DraftOutcome(f"easy {number % 5}", 5, 5))
        curve.observe(DraftOutcome("hard", 1, 0))
    assert controller.network_due_in(1) > 0
    assert controller.decide(hard).reason is Reason.NO_GAIN
    assert controller.network_due_in(1, has_prompts=True) == 0
    assert controller.network_due_in(1) > 0  # for the hard one alone no states are kept
    controller._standing.put(controller.decide(hard), 1, 0, 99).is_proven = True
    controller.forget("hard")
    assert not controller.try_hold(1)  # it is decided for the next one, behind its prompt
    assert controller.network_due_in(4, has_prompts=True) > 0  # among more some would be usual ones
    for number in range(400):  # now all are hard
        curve.observe(DraftOutcome(f"other {number % 10}", 1, 0))
    controller.decide(StepFacts((request("next", network="eagle3", lag_tokens=1),)))
    assert controller.network_due_in(1, has_prompts=True) > 0


def test_probes_are_as_rare_as_what_they_really_take_asks_for():
    def share(factor: float) -> float:
        controller = Controller(table(slope=0.1), 5)
        facts = StepFacts((request(network="eagle3"),))
        lost = total = 0.0
        for number in range(20000):
            decision = controller.standing if controller.try_hold(1) else controller.decide(facts)
            told = outcome(facts, decision)
            if decision.reason is Reason.NETWORK_PROBE:
                more_s = factor * (told.draft_s + told.target_s + told.host_s)
                told = replace(told, host_s=told.host_s + more_s - decision.step_s)
                lost += more_s - 1 if number > 2000 else 0
            total += decision.plain_s if number > 2000 else 0
            if controller.wants_outcome:
                controller.observe(told)
        return lost / total

    assert 0.002 < share(1.0) < 0.012
    assert 0.002 < share(2.5) < 0.012


@pytest.mark.parametrize(("num_labels", "drafts"), [(100, True), (600, False)])
def test_drafts_begin_where_few_labels_leave_room_for_a_gain(
    num_labels: int, drafts: bool, monkeypatch: pytest.MonkeyPatch
):
    """They said that drafts do not pay, by little: only many of them are believed."""
    controller = Controller(table(0.1, 0.3), 5)
    curve = controller.estimates.network("eagle3", "", ())
    for number in range(num_labels):
        curve.observe(DraftOutcome(str(number), 1, int(number * 0.35 % 1 < 0.35)))
        curve.forget(str(number))
    facts = StepFacts((request("new", network="eagle3"),))
    decision = copy.deepcopy(controller).decide(facts)
    assert bool(decision.grants) == drafts
    assert decision.reason is (Reason.GAIN if drafts else Reason.NO_GAIN)
    monkeypatch.setattr("outdraft.control.controller.HOPE", 0.0)
    assert controller.decide(facts).reason is Reason.NO_GAIN
