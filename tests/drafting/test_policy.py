"""Who drafts, how much, and whom it concerns."""

from collections.abc import Sequence

import numpy as np
import pytest

from outdraft.config.speculation import (
    DraftNetworkConfig,
    NgramConfig,
    SpeculationConfig,
    SuffixConfig,
)
from outdraft.core.draft import Draft, DraftAsk, DraftSource
from outdraft.core.errors import RequestError
from outdraft.core.plan import MODEL_CHAIN, DraftChoice, ModelDrafting
from outdraft.core.request import FinishReason, Request
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.policy import (
    REFUSALS_PER_TRIAL,
    DrafterLimits,
    DraftPolicy,
    most_draft_rows,
)


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
    **speculation,
) -> Request:
    return Request(
        request_id,
        [1] * num_prompt,
        SamplingParams(max_tokens=max_tokens, speculation=speculation),
        seed=0,
        max_model_len=1000,
        prediction_ids=prediction,
    )


def draft(number: int, score: float) -> Draft:
    return Draft.chain([1] * number, score)


def ngram(**drafts: Draft) -> ScriptedProposer:
    return ScriptedProposer(DraftSource.NGRAM, drafts)


def suffix(**drafts: Draft) -> ScriptedProposer:
    return ScriptedProposer(DraftSource.SUFFIX, drafts)


def policy(
    *proposers: ScriptedProposer,
    drafter_max_len: int | None = None,
    drafter_cost: float = 0.0,
    drafting: ModelDrafting = MODEL_CHAIN,
    **options,
) -> DraftPolicy:
    configs = {DraftSource.NGRAM: NgramConfig(), DraftSource.SUFFIX: SuffixConfig()}
    sources = [configs[p.source] for p in proposers]
    if drafter_max_len is not None:
        sources.append(DraftNetworkConfig(model="m"))
    config = SpeculationConfig(sources=tuple(sources), **options)
    limits = None
    if drafter_max_len is not None:
        limits = DrafterLimits(drafter_max_len, drafter_cost, drafting)
    return DraftPolicy(config, proposers, limits, max_num_seqs=8)


MODEL = DraftChoice(DraftSource.MODEL, num_model_drafts=4)
EAGLE_CHAIN = ModelDrafting(DraftSource.EAGLE3, max_kept=-1)
MODEL_TREE = ModelDrafting(levels=(2, 1, 1), max_kept=0)
PARALLEL = ModelDrafting(max_kept=0)


def test_without_a_draft_there_is_no_choice():
    assert policy(ngram()).choose([request()], 1) == {}


def test_the_model_drafts_where_the_host_has_no_idea():
    ours = policy(ngram(b=draft(4, 4.0)), drafter_max_len=100)
    choices = ours.choose([request("a"), request("b")], 2)
    assert choices["a"] == MODEL
    assert choices["b"].source is DraftSource.NGRAM


def test_a_host_draft_must_promise_more_than_the_model_delivers():
    ours = policy(ngram(a=draft(4, 1.5)), drafter_max_len=100)
    assert ours.choose([request()], 1)["a"] == MODEL  # the model starts at 2 of 4
    for _ in range(60):
        ours.observe(MODEL, 0)
    assert ours.choose([request()], 1)["a"].source is DraftSource.NGRAM


def test_of_two_equal_promises_the_source_configured_first_wins():
    first, second = suffix(a=draft(3, 2.0)), ngram(a=draft(4, 2.0))
    assert policy(first, second).choose([request()], 1)["a"].source is DraftSource.SUFFIX
    assert policy(second, first).choose([request()], 1)["a"].source is DraftSource.NGRAM


def test_the_greater_promise_wins_over_the_order():
    ours = policy(suffix(a=draft(3, 1.0)), ngram(a=draft(4, 2.0)))
    assert ours.choose([request()], 1)["a"].source is DraftSource.NGRAM


def test_a_promise_never_counts_for_more_than_the_drafts_length():
    ours = policy(suffix(a=draft(1, 50.0)), ngram(a=draft(4, 2.0)))
    assert ours.choose([request()], 1)["a"].source is DraftSource.NGRAM


def test_a_source_that_does_not_keep_its_promises_loses_to_one_that_does():
    ours = policy(suffix(a=draft(4, 3.0)), ngram(a=draft(4, 2.0)))
    choice = ours.choose([request()], 1)["a"]
    assert choice.source is DraftSource.SUFFIX
    for _ in range(60):
        ours.observe(choice, 0)
    assert ours.choose([request()], 1)["a"].source is DraftSource.NGRAM


def test_a_host_draft_that_promises_next_to_nothing_is_not_verified():
    ours = policy(ngram(a=draft(4, 0.39), b=draft(4, 0.41)))
    assert set(ours.choose([request("a"), request("b")], 2)) == {"b"}


def test_a_source_that_is_refused_again_and_again_is_tried_once_in_a_while():
    ours = policy(ngram(a=draft(4, 2.0)))
    choice = ours.choose([request()], 1)["a"]
    for _ in range(200):
        ours.observe(choice, 0)
    tried = [bool(ours.choose([request()], 1)) for _ in range(2 * REFUSALS_PER_TRIAL)]
    assert [i for i, was_tried in enumerate(tried, 1) if was_tried] == [32, 64]
    for _ in range(200):
        ours.observe(choice, 4)  # it has become right
    assert ours.choose([request()], 1) == {"a": choice}


@pytest.mark.parametrize(
    ("cost", "source"), [(0.1, "draft_model"), (0.25, "ngram"), (1.0, "ngram")]
)
def test_the_time_the_drafter_takes_is_weighed_against_what_it_delivers(cost, source):
    # The model brings 1 + 2 tokens in 1 + 4 * cost steps, the host 1 + 1 in one.
    ours = policy(ngram(a=draft(4, 1.0)), drafter_max_len=100, drafter_cost=cost)
    assert str(ours.choose([request()], 1)["a"].source) == source


def test_a_request_too_long_for_the_drafter_keeps_its_host_draft_whatever_the_model_delivers():
    ours = policy(ngram(a=draft(4, 0.5)), drafter_max_len=100)
    assert ours.choose([request(num_prompt=99)], 1)["a"].source is DraftSource.NGRAM


def test_the_model_cannot_deliver_more_tokens_than_the_request_wants():
    ours = policy(ngram(a=draft(2, 1.5), b=draft(2, 1.5)), drafter_max_len=100)
    choices = ours.choose([request("a", num_speculative_tokens=1), request("b")], 2)
    assert choices["a"].source is DraftSource.NGRAM
    assert choices["b"] == MODEL


@pytest.mark.parametrize(("num_running", "drafts"), [(2, True), (3, False)])
def test_no_drafts_while_more_requests_run_than_allowed(num_running, drafts):
    proposer = ngram(a=draft(4, 4.0))
    ours = policy(proposer, disable_by_batch_size=2, drafter_max_len=100)
    assert bool(ours.choose([request()], num_running)) is drafts
    assert bool(proposer.asked) is drafts


def test_switching_off_concerns_the_request_that_did():
    ours = policy(proposer := ngram(), drafter_max_len=100)
    choices = ours.choose([request("a", enabled=False), request("b")], 2)
    assert choices == {"b": MODEL}
    assert proposer.asked == [("b", 4)]


@pytest.mark.parametrize(("number", "expected"), [(0, None), (2, 2), (4, 4), (9, 4)])
def test_a_request_may_ask_for_fewer_drafts_but_not_for_more(number, expected):
    ours = policy(proposer := ngram(), drafter_max_len=100)
    choices = ours.choose([request("a", num_speculative_tokens=number), request("b")], 2)
    assert (choices["a"].num_model_drafts if "a" in choices else None) == expected
    assert choices["b"] == MODEL
    assert ("b", 4) in proposer.asked


def test_near_its_end_a_request_drafts_only_what_it_can_still_emit():
    ours = policy(drafter_max_len=100)
    assert ours.choose([request(max_tokens=3)], 1)["a"].num_model_drafts == 2
    assert ours.choose([request(max_tokens=1)], 1) == {}


def test_near_its_end_a_request_gets_the_first_levels_of_a_tree():
    drafting = ModelDrafting(levels=(3, 2, 1), max_kept=0)
    ours = policy(drafter_max_len=100, drafting=drafting, num_speculative_tokens=6)
    numbers = {
        max_tokens: choices["a"].num_model_drafts if choices else 0
        for max_tokens in range(1, 9)
        for choices in [ours.choose([request(max_tokens=max_tokens)], 1)]
    }
    assert numbers == {1: 0, 2: 3, 3: 5, 4: 6, 5: 6, 6: 6, 7: 6, 8: 6}


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_a_request_that_names_a_source_gets_no_other(method):
    everyone = {"a": draft(4, 4.0)}
    proposers = [suffix(**everyone), ngram(**everyone)]
    ours = policy(*proposers, drafter_max_len=100)
    choice = ours.choose([request(method=method)], 1)["a"]
    assert str(choice.source) == method
    assert all(not p.asked for p in proposers if str(p.source) != method)


def test_a_request_too_long_for_the_drafter_changes_nobody_elses_draft():
    ours = policy(ngram(long=draft(4, 1.0)), drafter_max_len=20)
    others = [request("short"), request("long", num_prompt=17), request("fits", num_prompt=16)]
    choices = ours.choose(others, 3)
    assert choices["short"] == choices["fits"] == MODEL
    assert choices["long"].source is DraftSource.NGRAM


def test_what_some_requests_do_changes_no_other_choice():
    drafts = {"b": draft(3, 3.0)}
    alone = policy(ngram(**drafts), drafter_max_len=20).choose([request("b"), request("c")], 2)
    company = [
        request("off", enabled=False),
        request("b"),
        request("long", num_prompt=100),
        request("c"),
        request("zero", num_speculative_tokens=0),
    ]
    together = policy(ngram(**drafts), drafter_max_len=20).choose(company, 5)
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


def test_a_proposer_that_forgets_a_request_is_caught():
    class Forgetful(ScriptedProposer):
        def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
            return []

    with pytest.raises(ValueError, match="zip"):
        policy(Forgetful(DraftSource.NGRAM, {})).choose([request()], 1)


def test_what_the_client_predicted_goes_before_every_other_source():
    everyone = {"a": draft(4, 4.0), "b": draft(4, 4.0)}
    ours = policy(proposer := suffix(**everyone), drafter_max_len=100)
    predicted = request("a", max_tokens=200, prediction=list(range(100)))
    choices = ours.choose([predicted, request("b")], 2)
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
    ours = policy(ngram(a=draft(4, 4.0)))
    choices = ours.choose([request("a", prediction=[1, 2, 3], **wish)], 1)
    assert [choice.source for choice in choices.values()] == ([source] if source else [])


def test_predictions_are_cut_to_what_was_asked_for_and_to_a_share_of_the_step():
    long = {"max_tokens": 200, "prediction": list(range(100))}
    ours = policy(ngram(), num_speculative_tokens=4)
    assert len(ours.choose([request("a", num_speculative_tokens=2, **long)], 1)["a"]) == 2
    crowd = [request(str(i), **long) for i in range(8)]
    drafted = sum(len(choice) for choice in ours.choose(crowd, 8).values())
    assert drafted <= most_draft_rows(ours.config, 8) == 63


def test_an_engine_without_speculation_ignores_predictions():
    ours = DraftPolicy(SpeculationConfig(), [], None, max_num_seqs=8)
    assert ours.choose([request("a", prediction=[1, 2, 3])], 1) == {}
    assert most_draft_rows(ours.config, 8) == 0
    with pytest.raises(RequestError, match="without speculation"):
        ours.check(request(method="prediction"))


GOOD = 3.9  # of four


@pytest.mark.parametrize(
    ("drafting", "score", "cost", "num_model_drafts"),
    [
        pytest.param(MODEL_CHAIN, GOOD, 0.15, 4, id="a sure draft is continued"),
        pytest.param(MODEL_CHAIN, 2.7, 0.15, 0, id="not one that will be cut short"),
        pytest.param(MODEL_CHAIN, GOOD, 0.5, 0, id="nor by a dear drafter"),
        pytest.param(EAGLE_CHAIN, GOOD, 0.05, 0, id="nor by one that waits for the target"),
        pytest.param(MODEL_TREE, GOOD, 0.05, 0, id="nor by a tree"),
        pytest.param(PARALLEL, GOOD, 0.05, 4, id="but by mask tokens"),
    ],
)
def test_a_network_goes_on_where_a_good_draft_of_the_host_ends(
    drafting: ModelDrafting, score: float, cost: float, num_model_drafts: int
):
    ours = policy(
        ngram(a=draft(4, score)),
        drafter_max_len=100,
        drafter_cost=cost,
        drafting=drafting,
        num_speculative_tokens=8,
    )
    for _ in range(60):  # the host has lately been right
        ours.observe(DraftChoice(DraftSource.NGRAM, draft(4, score)), round(score))
    choice = ours.choose([request()], 1)["a"]
    assert choice.source is DraftSource.NGRAM
    assert choice.num_model_drafts == num_model_drafts
    assert [choice.source_of(row) for row in range(len(choice))] == [DraftSource.NGRAM] * 4 + [
        drafting.source
    ] * num_model_drafts


def test_each_source_of_a_mixed_draft_learns_from_its_own_part():
    ours = policy(ngram(), drafter_max_len=100)
    mixed = DraftChoice(DraftSource.NGRAM, draft(2, 2.0), num_model_drafts=3)
    before = ours._records[DraftSource.MODEL].accepted
    ours.observe(mixed, 1)  # refused before the model's part
    assert ours._records[DraftSource.MODEL].accepted == before
    for _ in range(200):
        ours.observe(mixed, 5)
    assert ours._records[DraftSource.MODEL].accepted == pytest.approx(3, abs=0.01)
    assert ours._records[DraftSource.NGRAM].accepted == pytest.approx(2, abs=0.01)
