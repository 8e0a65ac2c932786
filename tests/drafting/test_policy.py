"""Who drafts, how much, and whom it concerns."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from outdraft.config.speculation import (
    DraftNetworkConfig,
    NgramConfig,
    SpeculationConfig,
    SuffixConfig,
)
from outdraft.control.facts import DraftOutcome, HostOffer, ShadowOutcome, StepFacts, StepOutcome
from outdraft.control.policy import FixedLength, LengthPolicy
from outdraft.core.decision import CHAIN, Decision, Grant, LiveStop, Reason, Shape
from outdraft.core.draft import MAX_DRAFTS, Draft, DraftAsk, DraftSource
from outdraft.core.errors import RequestError
from outdraft.core.plan import (
    DraftChoice,
    PhaseTimes,
    StepResult,
    StepStats,
    Work,
    WorkResult,
)
from outdraft.core.request import BookedWork, FinishReason, Request
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.policy import WARM_UP_STEPS, DraftPolicy
from outdraft.drafting.request_limits import DrafterLimits, most_draft_rows
from outdraft.engine.stats import step_stats

ALWAYS = FixedLength(MAX_DRAFTS)


class ScriptedProposer:
    """Returns written drafts, by request id, and remembers what it was asked."""

    def __init__(self, source: DraftSource, drafts: dict[str, Draft]) -> None:
        self.source = source
        self.drafts = drafts
        self.asked: list[tuple[str, int]] = []
        self.finished: list[tuple[str, list[int] | None]] = []

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        self.asked += [(ask.request_id, ask.max_tokens) for ask in asks]
        return [self.drafts.get(ask.request_id, Draft()) for ask in asks]

    def finish(self, request_id: str, token_ids: np.ndarray | None) -> None:
        self.finished.append((request_id, None if token_ids is None else token_ids.tolist()))


def request(
    request_id: str = "a",
    num_prompt: int = 3,
    max_tokens: int = 50,
    prediction: Sequence[int] = (),
    temperature: float = 1.0,
    seed: int | None = None,
    **speculation,
) -> Request:
    return Request(
        request_id,
        [1] * num_prompt,
        SamplingParams(
            temperature=temperature, max_tokens=max_tokens, seed=seed, speculation=speculation
        ),
        seed=0,
        max_model_len=1000,
        prediction_ids=prediction,
    )


def draft(number: int) -> Draft:
    return Draft.chain([1] * number)


def ngram(**drafts: Draft) -> ScriptedProposer:
    return ScriptedProposer(DraftSource.NGRAM, drafts)


def suffix(**drafts: Draft) -> ScriptedProposer:
    return ScriptedProposer(DraftSource.SUFFIX, drafts)


def unread(one: Request) -> int:
    return one.num_tokens - one.num_drafter_computed


def policy(
    *proposers: ScriptedProposer,
    drafter_max_len: int | None = None,
    shape: Shape = CHAIN,
    control: LengthPolicy = ALWAYS,
    **options,
) -> DraftPolicy:
    configs = {DraftSource.NGRAM: NgramConfig(), DraftSource.SUFFIX: SuffixConfig()}
    sources = [configs[p.source] for p in proposers]
    if drafter_max_len is not None:
        sources.append(DraftNetworkConfig(model="m"))
    limits = None
    if drafter_max_len is not None:
        limits = DrafterLimits(drafter_max_len, shapes=(shape,), unread_tokens=unread)
    options.setdefault("num_speculative_tokens", 4)
    config = SpeculationConfig(sources=tuple(sources), **options)
    return DraftPolicy(config, proposers, limits, control, max_num_seqs=8)


class Scripted:
    """Grants what a function of the facts says, and remembers what it is told."""

    def __init__(
        self,
        grants: Callable[[StepFacts], Sequence[Grant]] = lambda _: (),
        *,
        shadows: tuple[str, ...] = (),
    ) -> None:
        self.grants, self.shadows = grants, shadows
        self.facts: list[StepFacts] = []
        self.outcomes: list[StepOutcome] = []
        self.forgotten: list[str] = []
        self.decided: Decision | None = None
        self.held: Decision | None = None  # what holds
        self.looks_first = False  # where sources of the host may find drafts
        self.asked_to_hold: list[tuple[int, int, bool]] = []
        self.due_in = 0

    def decide(self, facts: StepFacts) -> Decision:
        self.facts.append(facts)
        grants = tuple(self.grants(facts))
        self.decided = Decision(Reason.GAIN, grants, shadows=self.shadows)
        return self.decided

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    def hold(
        self, num_requests: int, prompt_rows: int = 0, *, may_offer: bool = False
    ) -> Decision | None:
        self.asked_to_hold.append((num_requests, prompt_rows, may_offer))
        return None if may_offer and self.looks_first else self.held

    def network_due_in(self) -> int:
        return self.due_in

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def booking(one: Request, choice: DraftChoice | None, accepted: int = 0) -> BookedWork:
    """A step's part of a request that accepted the first drafts."""
    drafted = () if choice is None else choice.draft.token_ids or (1,) * choice.num_model_drafts
    new_ids = (1,) * (accepted + 1)
    result = WorkResult(new_ids, tuple(range(accepted)), drafted)
    work = Work(0, one.num_tokens - 1, 1, True, choice)
    return BookedWork(one, work, result, new_ids)


NO_TIMES = PhaseTimes()


def stats(num_rows: int, times: PhaseTimes = NO_TIMES) -> StepStats:
    """The numbers of a step that the host took two seconds for."""
    step_s = 2.0 + times.draft_s + times.verify_s + times.sample_s
    rest = {"num_waiting": 0, "kv_usage": 0.0}
    return step_stats([], StepResult((), num_rows, times), step_s=step_s, **rest)


ROOM = StepFacts((), prompt_rows=5, free_rows=40, free_slots=60)
MODEL = DraftChoice(DraftSource.MODEL, num_model_drafts=4)


def test_without_a_draft_there_is_no_choice():
    assert policy(ngram()).choose([request()], 1, ROOM) == {}


def test_the_model_drafts_where_the_host_has_no_idea():
    ours = policy(ngram(b=draft(4)), drafter_max_len=100)
    choices = ours.choose([request("a"), request("b")], 2, ROOM)
    assert choices["a"] == MODEL
    assert choices["b"].source is DraftSource.NGRAM


def test_facts_say_what_each_request_could_draft():
    control = Scripted()
    tree = Draft((1, 2, 3, 4), (0, 0, 1, 1), match_length=5)
    ours = policy(suffix(a=tree), ngram(a=draft(3)), drafter_max_len=100, control=control)
    one = request("a", num_prompt=10, max_tokens=20)
    one.num_computed, one.num_drafter_computed = 9, 4
    ours.choose([one, request("b", temperature=0.0), request("c", seed=1)], 3, ROOM)
    [facts] = control.facts
    assert (facts.prompt_rows, facts.free_rows, facts.free_slots) == (5, 40, 60)
    a, b, c = facts.requests
    assert a.offers == (HostOffer("suffix", 2, 5, (2, 2)), HostOffer("ngram", 3, 0))
    assert (a.max_tokens, a.max_drafts, a.context_tokens) == (20, 4, 10)
    assert (a.network, a.shapes, a.unread_tokens) == ("draft_model", ((),), 6)
    assert b.offers == c.offers == ()
    assert [facts.rule for facts in (a, b, c)] == ["block", "greedy", "drafter_invariant"]


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_a_granted_draft_has_the_granted_levels(levels: int):
    tree = Draft((1, 2, 3, 4, 5), (0, 1, 0, 2, 3))
    control = Scripted(lambda _: [Grant("a", "suffix", levels, 9)])
    choice = policy(suffix(a=tree), control=control).choose([request()], 1, ROOM)["a"]
    assert choice.draft.level_sizes() == (2, 2, 1)[:levels]
    assert choice.draft.token_ids == {1: (1, 3), 2: (1, 2, 3, 5), 3: (1, 2, 3, 4, 5)}[levels]


def test_what_came_of_a_step_is_told_with_its_times():
    control = Scripted(lambda _: [Grant("a", "ngram", 3, 3), Grant("b", "draft_model", 4, 4)])
    ours = policy(ngram(a=draft(3)), drafter_max_len=100, control=control)
    requests = [request("a"), request("b"), request("c")]
    choices = ours.choose(requests, 3, ROOM)
    prompt = request("new", num_prompt=8)
    booked = [
        booking(requests[0], choices["a"], accepted=1),
        booking(requests[1], choices["b"], accepted=4),
        booking(requests[2], None),
        BookedWork(prompt, Work(0, 0, 8, False), WorkResult(), ()),
    ]
    ours.observe(booked, stats(18, PhaseTimes(0.25, 0.5, 0.125)))
    [outcome] = control.outcomes
    assert outcome.drafts == (DraftOutcome("a", 3, 1), DraftOutcome("b", 4, 4))
    assert (outcome.num_tokens, outcome.num_rows) == (2 + 5 + 1, 3 + 3 + 4 + 8)
    assert outcome.facts.prompt_rows == 8
    assert (outcome.draft_s, outcome.target_s) == (0.25, 0.625)
    assert 0 < outcome.deciding_s < 1
    assert outcome.host_s + outcome.deciding_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("grants", "target_s"), [([Grant("a", "draft_model", 4, 4)], 0.75), ([], 0.5)]
)
def test_states_are_kept_for_drafts_and_not_for_plain_decoding(grants, target_s):
    """Else plain decoding would look slow wherever a network that reads states may draft soon."""
    control = Scripted(lambda _: grants)
    ours = policy(drafter_max_len=100, control=control)
    one = request("a")
    choices = ours.choose([one], 1, ROOM)
    times = PhaseTimes(0.0, 0.25, 0.5, keep_s=0.25)
    ours.observe([booking(one, choices.get("a"))], stats(5, times))
    [outcome] = control.outcomes
    assert outcome.target_s == target_s


def test_sending_drafts_of_the_host_is_time_of_the_host():
    control = Scripted(lambda _: [Grant("a", "ngram", 3, 3)])
    ours = policy(ngram(a=draft(3)), drafter_max_len=100, control=control)
    one = request("a")
    choices = ours.choose([one], 1, ROOM)
    ours.observe([booking(one, choices["a"])], stats(4, PhaseTimes(0.25, 0.5, 0.125)))
    [outcome] = control.outcomes
    assert outcome.draft_s == 0
    assert outcome.host_s + outcome.deciding_s == pytest.approx(2.25)


def test_deciding_and_learning_is_told_apart_from_the_time_of_the_host():
    control = Scripted(lambda facts: [Grant(facts.requests[0].request_id, "ngram", 3, 3)])
    ours = policy(ngram(a=draft(3), b=draft(3)), control=control)
    one, other = request("a"), request("b")
    for drafting in (one, other):
        choices = ours.choose([drafting], 1, ROOM)
        ours.observe([booking(drafting, choices[drafting.id])], stats(4))
    control.grants = lambda facts: ()
    ours.choose([one], 1, ROOM)
    ours.observe([booking(one, None)], stats(1))
    first, second, plain = control.outcomes
    assert first.host_s + first.deciding_s == pytest.approx(2.0)  # nothing was learned before
    assert second.host_s + second.deciding_s > 2.0
    assert plain.host_s < 2.0


def test_nothing_is_told_of_a_step_in_which_something_was_made_ready():
    """It takes a hundred times as long where a graph is made, and no later step is like it."""
    control = Scripted(lambda _: [Grant("a", "draft_model", 4, 4)])
    ours = policy(drafter_max_len=100, control=control)
    one = request("a")
    for is_first, is_told in ((True, 0), (False, 1), (True, 1)):
        choices = ours.choose([one], 1, ROOM)
        times = PhaseTimes(0.25, 0.5, 0.125, is_first=is_first)
        ours.observe([booking(one, choices["a"])], stats(5, times))
        assert len(control.outcomes) == is_told


@pytest.mark.parametrize("ends_live", [False, True])
def test_a_chain_has_a_live_rule_only_where_the_engine_can_leave_its_rows_out(ends_live):
    control = Scripted(lambda _: [Grant("a", "draft_model", 4, 4)])
    limits = DrafterLimits(100, ends_live=ends_live)
    config = SpeculationConfig(sources=(DraftNetworkConfig(model="m"),), num_speculative_tokens=4)
    DraftPolicy(config, [], limits, control, 8).choose([request("a")], 1, ROOM)
    [facts] = control.facts
    assert [one.can_stop for one in facts.requests] == [ends_live]


@pytest.mark.parametrize(
    ("changes", "number", "most", "granted"),
    [
        ({}, 3, None, [4, 4, 4]),
        ({}, 3, 12, [4, 4, 4]),
        ({}, 3, 11, [3, 3, 3]),
        ({}, 3, 3, [1, 1, 1]),
        ({}, 3, 2, [1, 1]),
        ({"temperature": 0.0}, 3, 2, [4, 4, 4]),
        ({"seed": 1}, 3, 2, [4, 4, 4]),
    ],
)
def test_drawn_drafts_of_a_step_are_as_many_as_their_probabilities_have_room_for(
    changes, number, most, granted
):
    control = Scripted(
        lambda facts: [Grant(one.request_id, "draft_model", 4, 4) for one in facts.requests]
    )
    config = SpeculationConfig(sources=(DraftNetworkConfig(model="m"),), num_speculative_tokens=4)
    ours = DraftPolicy(config, [], DrafterLimits(100, most_drawn=most), control, 8)
    choices = ours.choose([request(str(i), **changes) for i in range(number)], number, ROOM)
    assert [choice.num_model_drafts for choice in choices.values()] == granted


def test_nothing_is_told_of_a_step_that_lost_a_request():
    control = Scripted()
    ours = policy(ngram(), control=control)
    kept, preempted = request("a"), request("b")
    ours.choose([kept, preempted], 2, ROOM)
    ours.observe([booking(kept, None)], stats(1))
    assert control.outcomes == []


def test_unused_offers_are_compared_with_the_text_that_comes():
    right = Draft.chain([7, 8, 9])
    tree = Draft((5, 7, 6, 8), (0, 0, 2, 2), match_length=2)
    control = Scripted(shadows=("a",))
    ours = policy(suffix(a=tree), ngram(a=right), control=control)
    one = request("a")
    for token_id in (7, 8, 4):
        ours.choose([one], 1, ROOM)
        control.shadows = ()
        one.append(token_id)
        ours.observe([booking(one, None)], stats(1))
    told = [outcome.shadows for outcome in control.outcomes]
    assert told == [
        (),
        (ShadowOutcome("suffix", 2, 2, 2),),  # the second branch, to its end
        (ShadowOutcome("ngram", 0, 3, 2),),
    ]


def test_a_granted_draft_casts_no_shadow_of_its_own():
    control = Scripted(lambda _: [Grant("a", "ngram", 3, 3)], shadows=("a",))
    ours = policy(suffix(a=draft(2)), ngram(a=draft(3)), control=control)
    one = request("a")
    ours.choose([one], 1, ROOM)
    one.append(4)
    ours.observe([booking(one, None)], stats(1))
    assert control.outcomes[0].shadows == (ShadowOutcome("suffix", 0, 2, 0),)


def test_a_step_that_is_held_needs_no_facts_and_is_told_all_the_same():
    control = Scripted(lambda _: [Grant("a", "draft_model", 4, 4)])
    ours = policy(drafter_max_len=100, control=control)
    one = request("a")
    choices = ours.choose([one], 1, ROOM)
    ours.observe([booking(one, choices["a"], accepted=1)], stats(5))
    control.held = control.decided
    assert ours.choose([one], 1, ROOM) == choices
    assert ours.granted["a"] is choices["a"]  # none is made anew
    step = stats(5, PhaseTimes(0.25, 0.5, 0.125))
    ours.observe([booking(one, choices["a"], accepted=4)], step)
    assert control.asked_to_hold == [(1, 5, False)] * 2
    assert len(control.facts) == 1
    first, second = control.outcomes
    assert (first.is_held, second.is_held) == (False, True)
    assert second.facts.requests is first.facts.requests
    assert second.drafts == (DraftOutcome("a", 4, 4),)
    assert second.host_s == 2.0  # nothing was decided in it


def test_where_the_host_looks_in_vain_the_decision_holds():
    control, proposer = Scripted(), ngram()
    ours = policy(proposer, control=control)
    one = request("a")
    ours.choose([one], 1, ROOM)
    ours.observe([booking(one, None)], stats(1))
    control.held, control.looks_first = control.decided, True
    ours.choose([one], 1, ROOM)
    ours.observe([booking(one, None)], stats(1))
    assert control.asked_to_hold[-2:] == [(1, 5, True), (1, 5, False)]
    assert len(proposer.asked) == 2
    assert len(control.facts) == 1
    assert control.outcomes[1].is_held
    assert 0 < control.outcomes[1].deciding_s < 1
    control.looks_first = False
    ours.choose([one], 1, ROOM)
    assert len(proposer.asked) == 2


def test_steps_that_follow_a_refused_offer_are_told_too():
    control = Scripted()
    ours = policy(ngram(a=draft(2)), control=control)
    one = request("a")
    for is_held in (False, True):
        control.held = control.decided if is_held else None
        assert ours.choose([one], 1, ROOM) == {}
        ours.observe([booking(one, None)], stats(1))
    assert [told.is_held for told in control.outcomes] == [False, True]


def test_an_offer_is_decided_on_although_a_decision_holds():
    control = Scripted(lambda _: [Grant("a", "ngram", 2, 2)])
    ours = policy(ngram(a=draft(2)), control=control)
    control.held = Decision(Reason.NO_GAIN, target_s=1, plain_s=1, tokens=1)
    control.looks_first = True
    assert set(ours.choose([request("a")], 1, ROOM)) == {"a"}


def test_only_the_step_that_was_decided_is_told_to_catch_up():
    grant = Grant("a", "draft_model", 4, 4)
    decided = Decision(Reason.GAIN, (grant,), 0, 7, 2, 1, 2, 5, 0.5, (), 6)
    control = Scripted()
    control.decide = lambda facts: decided
    ours = policy(drafter_max_len=100, control=control)
    one = request("a")
    predicted = list[float]()
    for _ in range(3):
        ours.choose([one], 1, ROOM)
        assert ours.decided is not None
        predicted.append(ours.decided.draft_s)
        control.held = decided
    assert predicted == [7, 1, 1]


@pytest.mark.parametrize(
    ("rule", "may_end"),
    [
        (None, None),
        (LiveStop((0.0,) * 4, (0.0,) * 4, 0.0), False),
        (LiveStop((1.0,) * 4, (0.0,) * 4, 0.5), True),
    ],
)
def test_a_chain_tells_margins_or_ends_by_them_as_its_grant_says(rule, may_end):
    control = Scripted(lambda _: [Grant("a", "draft_model", 4, 4, stop=rule)])
    choice = policy(drafter_max_len=100, control=control).choose([request("a")], 1, ROOM)["a"]
    assert (None if choice.stop is None else choice.stop.may_end) == may_end


def test_a_held_step_drafts_nothing_for_a_text_that_became_too_long_for_the_network():
    ids = "a", "b"
    control = Scripted(lambda _: [Grant(one, "draft_model", 4, 4) for one in ids])
    ours = policy(drafter_max_len=12, control=control)
    short, long = request("a", num_prompt=4), request("b", num_prompt=7)
    assert set(ours.choose([short, long], 2, ROOM)) == {"a", "b"}
    ours.observe([booking(short, None), booking(long, None)], stats(2))
    control.held = control.decided
    long.append(4)
    assert long.num_tokens + 4 <= 12
    assert set(ours.choose([short, long], 2, ROOM)) == {"a", "b"}
    long.append(4)
    assert long.num_tokens + 4 > 12
    assert set(ours.choose([short, long], 2, ROOM)) == {"a"}


def test_who_decides_forgets_requests_that_ended():
    control = Scripted()
    policy(ngram(), control=control).finish(request("a"))
    assert control.forgotten == ["a"]


@pytest.mark.parametrize(("num_running", "drafts"), [(2, True), (3, False)])
def test_no_drafts_while_more_requests_run_than_allowed(num_running, drafts):
    proposer = ngram(a=draft(4))
    ours = policy(proposer, disable_by_batch_size=2, drafter_max_len=100)
    assert bool(ours.choose([request()], num_running, ROOM)) is drafts
    assert bool(proposer.asked) is drafts


def test_switching_off_concerns_the_request_that_did():
    ours = policy(proposer := ngram(), drafter_max_len=100)
    choices = ours.choose([request("a", enabled=False), request("b")], 2, ROOM)
    assert choices == {"b": MODEL}
    assert proposer.asked == [("b", 4)]


@pytest.mark.parametrize(("number", "expected"), [(0, None), (2, 2), (4, 4), (9, 4)])
def test_a_request_may_ask_for_fewer_drafts_but_not_for_more(number, expected):
    ours = policy(proposer := ngram(), drafter_max_len=100)
    choices = ours.choose([request("a", num_speculative_tokens=number), request("b")], 2, ROOM)
    assert (choices["a"].num_model_drafts if "a" in choices else None) == expected
    assert choices["b"] == MODEL
    assert ("b", 4) in proposer.asked


def test_near_its_end_a_request_drafts_only_what_it_can_still_emit():
    ours = policy(drafter_max_len=100)
    assert ours.choose([request(max_tokens=3)], 1, ROOM)["a"].num_model_drafts == 2
    assert ours.choose([request(max_tokens=1)], 1, ROOM) == {}


def test_near_its_end_a_request_gets_the_first_levels_of_a_tree():
    ours = policy(drafter_max_len=100, shape=(3, 2, 1), num_speculative_tokens=6)
    numbers = {
        max_tokens: choices["a"].num_model_drafts if choices else 0
        for max_tokens in range(1, 9)
        for choices in [ours.choose([request(max_tokens=max_tokens)], 1, ROOM)]
    }
    assert numbers == {1: 0, 2: 3, 3: 5, 4: 6, 5: 6, 6: 6, 7: 6, 8: 6}


def test_a_network_with_a_tree_is_offered_with_chains_beside_it():
    tree = (3, 2, 1)
    granted = [Grant("a", "draft_model", 2, 5, shape=tree)]
    control = Scripted(lambda facts: granted)
    config = SpeculationConfig(sources=(DraftNetworkConfig(model="m"),), num_speculative_tokens=6)
    limits = DrafterLimits(100, shapes=(tree, CHAIN), max_chain=4)
    ours = DraftPolicy(config, [], limits, control, max_num_seqs=8)
    choice = ours.choose([request("a")], 1, ROOM)["a"]
    assert (choice.num_model_drafts, choice.levels, choice.stop) == (5, tree, None)
    granted[:] = [Grant("a", "draft_model", 4, 4)]
    choice = ours.choose([request("a")], 1, ROOM)["a"]
    assert (choice.num_model_drafts, choice.levels) == (4, CHAIN)
    one = control.facts[0].requests[0]
    assert one.shapes == (tree, ())
    assert (one.most_levels(tree), one.most_levels(()), one.can_stop) == (3, 4, True)


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_a_request_that_names_a_source_gets_no_other(method):
    everyone = {"a": draft(4)}
    proposers = [suffix(**everyone), ngram(**everyone)]
    ours = policy(*proposers, drafter_max_len=100)
    choice = ours.choose([request(method=method)], 1, ROOM)["a"]
    assert str(choice.source) == method
    assert all(not p.asked for p in proposers if str(p.source) != method)


def test_a_request_too_long_for_the_drafter_changes_nobody_elses_draft():
    ours = policy(ngram(long=draft(4)), drafter_max_len=20)
    others = [request("short"), request("long", num_prompt=17), request("fits", num_prompt=16)]
    choices = ours.choose(others, 3, ROOM)
    assert choices["short"] == choices["fits"] == MODEL
    assert choices["long"].source is DraftSource.NGRAM


def test_what_some_requests_do_changes_no_other_choice():
    drafts = {"b": draft(3)}
    alone = policy(ngram(**drafts), drafter_max_len=20).choose(
        [request("b"), request("c")], 2, ROOM
    )
    company = [
        request("off", enabled=False),
        request("b"),
        request("long", num_prompt=100),
        request("c"),
        request("zero", num_speculative_tokens=0),
    ]
    together = policy(ngram(**drafts), drafter_max_len=20).choose(company, 5, ROOM)
    assert together == alone


@pytest.mark.parametrize("method", ["suffix", "draft_model", "combined", "nonsense"])
def test_a_source_that_is_not_configured_is_refused(method):
    ours = policy(ngram())
    with pytest.raises(RequestError, match="prediction, ngram") as caught:
        ours.check(request(method=method))
    assert caught.value.field == "speculation"
    for fine in (None, "prediction", "ngram"):
        ours.check(request(method=fine))


@pytest.mark.parametrize(
    ("reason", "text"), [(FinishReason.STOP, [1, 1, 1]), (FinishReason.ABORT, None)]
)
def test_proposers_learn_from_texts_that_ended_but_not_from_aborted_ones(reason, text):
    proposers = [ngram(), suffix()]
    one = request()
    one.finish_reason = reason
    policy(*proposers).finish(one)
    assert [p.finished for p in proposers] == [[("a", text)]] * 2


def test_proposers_learn_nothing_from_a_text_with_a_salt():
    proposers = [ngram(), suffix()]
    one = request()
    one = Request("a", [1], one.params, seed=0, max_model_len=9, cache_salt="secret")
    one.finish_reason = FinishReason.STOP
    policy(*proposers).finish(one)
    assert [p.finished for p in proposers] == [[("a", None)]] * 2


def test_a_proposer_that_forgets_a_request_is_caught():
    class Forgetful(ScriptedProposer):
        def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
            return []

    with pytest.raises(ValueError, match="zip"):
        policy(Forgetful(DraftSource.NGRAM, {})).choose([request()], 1, ROOM)


def test_what_the_client_predicted_goes_before_every_other_source():
    everyone = {"a": draft(4), "b": draft(4)}
    ours = policy(proposer := suffix(**everyone), drafter_max_len=100)
    predicted = request("a", max_tokens=200, prediction=list(range(100)))
    choices = ours.choose([predicted, request("b")], 2, ROOM)
    assert choices["a"].source is DraftSource.PREDICTION
    assert len(choices["a"]) > ours.config.num_speculative_tokens
    assert choices["b"].source is DraftSource.SUFFIX
    assert [asked for asked, _ in proposer.asked] == ["b"]


@pytest.mark.parametrize(
    ("wish", "source"),
    [
        ({}, DraftSource.PREDICTION),
        ({"method": "prediction"}, DraftSource.PREDICTION),
        ({"method": "ngram"}, DraftSource.NGRAM),
        ({"enabled": False}, None),
    ],
)
def test_a_request_chooses_whether_its_prediction_is_used(wish, source):
    ours = policy(ngram(a=draft(4)))
    choices = ours.choose([request("a", prediction=[1, 2, 3], **wish)], 1, ROOM)
    assert [choice.source for choice in choices.values()] == ([source] if source else [])


def test_predictions_are_cut_to_what_was_asked_for_and_to_a_share_of_the_step():
    long = {"max_tokens": 200, "prediction": list(range(100))}
    ours = policy(ngram(), num_speculative_tokens=4)
    assert len(ours.choose([request("a", num_speculative_tokens=2, **long)], 1, ROOM)["a"]) == 2
    crowd = [request(str(i), **long) for i in range(8)]
    drafted = sum(len(choice) for choice in ours.choose(crowd, 8, ROOM).values())
    assert drafted <= most_draft_rows(ours.config, 8) == 63


def test_an_engine_without_speculation_ignores_predictions():
    ours = DraftPolicy(SpeculationConfig(), [], None, ALWAYS, max_num_seqs=8)
    assert ours.choose([request("a", prediction=[1, 2, 3])], 1, ROOM) == {}
    assert most_draft_rows(ours.config, 8) == 0
    with pytest.raises(RequestError, match="without speculation"):
        ours.check(request(method="prediction"))


@pytest.mark.parametrize(
    ("due_in", "max_len", "running", "params", "is_followed"),
    [
        (0, 100, 1, {}, True),
        (WARM_UP_STEPS, 100, 1, {}, True),
        (WARM_UP_STEPS + 1, 100, 1, {}, False),
        (0, 10, 1, {}, False),
        (0, 100, 9, {}, False),
        (0, 100, 1, {"enabled": False}, False),
        (0, 100, 1, {"method": "suffix"}, False),
    ],
)
def test_a_request_is_followed_while_the_network_may_soon_draft_for_it(
    due_in: int, max_len: int, running: int, params: dict[str, Any], is_followed: bool
):
    control = Scripted()
    control.due_in = due_in
    ours = policy(suffix(), drafter_max_len=max_len, control=control, disable_by_batch_size=8)
    one = request("a", num_prompt=10, **params)
    may_follow = ours.may_follow(running)
    assert (may_follow and ours.limits.network_may_draft(one)) == is_followed
    assert ours.reads_prompts() == (due_in == 0)


class Priced(Scripted):
    """Grants, and says what it expects."""

    def decide(self, facts: StepFacts) -> Decision:
        grants = tuple(self.grants(facts))
        return Decision(Reason.GAIN, grants, 0.25 if grants else None, 0.1, 0.2, 0.3, 0.4, 5.0, 0.6)


def granted(levels: int) -> Callable[[StepFacts], list[Grant]]:
    return lambda facts: [
        Grant(one.request_id, "draft_model", levels, levels) for one in facts.requests
    ]


def test_what_was_decided_is_told_with_its_prediction_and_price():
    ours = policy(drafter_max_len=100, control=Priced(granted(3)))
    ours.choose([request()], 1, ROOM)
    want = Decision(Reason.GAIN, (), 0.25, 0.1, 0.2, 0.3, 0.4, 5.0, 0.6)
    assert ours.decided == want


def test_where_nobody_drafts_there_is_no_price():
    ours = policy(drafter_max_len=100, control=Priced())
    ours.choose([request()], 1, ROOM)
    assert ours.decided is not None
    assert ours.decided.price is None
    assert ours.decided.is_predicted


def test_fixed_lengths_predict_nothing():
    ours = policy(drafter_max_len=100)
    assert ours.choose([request()], 1, ROOM)
    assert ours.decided == Decision(Reason.GAIN)


def test_hard_rules_and_wishes_are_told_as_reasons():
    ours = policy(drafter_max_len=100, disable_by_batch_size=2)
    ours.choose([request()], 3, ROOM)
    assert ours.decided == Decision(Reason.DISABLED)
    ours.choose([request(enabled=False)], 1, ROOM)
    assert ours.decided == Decision(Reason.NOT_WANTED)
    ours.choose([], 1, ROOM)
    assert ours.decided is None
