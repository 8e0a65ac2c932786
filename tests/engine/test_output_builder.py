"""What a caller is given back, step by step."""

import pytest

from outdraft.core.draft import Draft, DraftSource
from outdraft.core.outputs import SpeculationMetrics, TokenOrigin
from outdraft.core.plan import DraftChoice, TokenLogprobs, Work, WorkResult
from outdraft.core.request import FinishReason, Request
from outdraft.core.sampling import SamplingParams
from outdraft.engine.detokenizer import Detokenizer
from outdraft.engine.output_builder import OutputBuilder
from tests.engine.byte_level import byte_ids, tokenizer

PLAIN, RECOVERED, BONUS = TokenOrigin.PLAIN, TokenOrigin.RECOVERED, TokenOrigin.BONUS
NGRAM, MODEL = TokenOrigin.NGRAM, TokenOrigin.MODEL
CHAIN = DraftChoice(DraftSource.NGRAM, Draft.chain([1, 2, 3]))
TREE = DraftChoice(DraftSource.NGRAM, Draft((1, 2, 3), (0, 0, 1)))  # row 2 is below row 0
MODELS = DraftChoice(DraftSource.MODEL, num_model_drafts=3)
MIXED = DraftChoice(DraftSource.NGRAM, Draft.chain([1]), num_model_drafts=2)


class Caller:
    """One request of one sequence, with its builder."""

    def __init__(self, **params) -> None:
        self.params = SamplingParams(max_tokens=50, **params)
        self.detokenizer = Detokenizer(tokenizer(), self.params.stop_strings)
        self.request = Request(
            "r/0",
            [5, 6],
            self.params,
            seed=0,
            max_model_len=100,
            find_stop_string=self.detokenizer.push,
        )
        self.builder = OutputBuilder(
            "r", "p", [5, 6], tokenizer(), [self.detokenizer], SpeculationMetrics(3)
        )
        self.output = self.builder.output
        self.completion = self.output.outputs[0]

    def step(self, outcome: WorkResult, drafts: DraftChoice | None = None) -> None:
        """What the scheduler and the engine do with one result."""
        work = Work(self.request, self.request.num_tokens - 1, 1, [], True, drafts)
        added: list[int] = []
        for token_id in outcome.token_ids:
            added.append(token_id)
            self.request.finish_reason = self.request.append(token_id)
            if self.request.finish_reason is not None:
                break
        self.builder.add(0, work, outcome, tuple(added))


@pytest.mark.parametrize(
    ("drafts", "rows", "origins"),
    [
        (None, (), [PLAIN]),
        (CHAIN, (), [RECOVERED]),
        (CHAIN, (0,), [NGRAM, RECOVERED]),
        (CHAIN, (0, 1, 2), [NGRAM, NGRAM, NGRAM, BONUS]),
        (TREE, (0,), [NGRAM, RECOVERED]),
        (TREE, (1,), [NGRAM, BONUS]),
        (TREE, (0, 2), [NGRAM, NGRAM, BONUS]),
        (MODELS, (0, 1), [MODEL, MODEL, RECOVERED]),
        (MODELS, (0, 1, 2), [MODEL, MODEL, MODEL, BONUS]),
        (MIXED, (0,), [NGRAM, RECOVERED]),
        (MIXED, (0, 1, 2), [NGRAM, MODEL, MODEL, BONUS]),
    ],
)
def test_every_token_says_how_it_came(drafts, rows, origins):
    caller = Caller()
    emitted = tuple(range(10, 11 + len(rows)))
    parents = () if drafts is None else (0, 0, 1) if drafts is TREE else (0, 1, 2)
    drafted = (1, 2, 3) if drafts else ()
    caller.step(WorkResult(emitted, rows, drafted, parents), drafts)
    assert caller.completion.origins == origins
    assert caller.completion.token_ids == list(emitted)


def test_only_steps_with_drafts_count_as_speculative():
    caller = Caller()
    caller.step(WorkResult((10,)))
    caller.step(WorkResult((10, 11), (0,), (1, 2, 3), (0, 1, 2)), CHAIN)
    metrics = caller.output.metrics.speculative_decoding
    assert (metrics.per_step_drafted, metrics.per_step_accepted) == ([3], [1])
    assert metrics.accepted_by_source == {"ngram": 1}


def test_text_that_could_become_a_stop_string_waits():
    caller = Caller(stop="bc")
    a, b, c, d = byte_ids("abcd")
    caller.step(WorkResult((a,)))
    caller.step(WorkResult((b,)))
    assert caller.completion.text == "a"
    caller.step(WorkResult((d,)))
    assert caller.completion.text == "abd"
    caller.step(WorkResult((b, c, d), (0, 1), (b, c), (0, 1)), CHAIN)
    assert caller.completion.text == "abd"
    assert (caller.completion.finish_reason, caller.completion.stop_reason) == ("stop", "bc")
    assert caller.completion.token_ids == [a, b, d, b, c]
    assert len(caller.completion.origins) == 5
    assert caller.output.finished


def test_a_stop_string_before_the_fewest_tokens_stays_in_the_text():
    caller = Caller(stop="b", min_tokens=4)
    for token_id in byte_ids("abcdbe"):
        if not caller.output.finished:
            caller.step(WorkResult((token_id,)))
    assert caller.completion.text == "abcd"
    assert caller.completion.stop_reason == "b"


def row(token_id: int, logprob: float, top: dict[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, 9, tuple(top), tuple(top.values()))


def test_logprobs_hold_the_chosen_token_and_as_many_others_as_asked_for():
    caller = Caller(logprobs=1)
    logs = (row(10, -3.0, {11: -0.5, 12: -1.0}), row(11, -0.25, {11: -0.25, 12: -4.0}))
    caller.step(WorkResult((10, 11), (0,), (10, 1, 1), (0, 1, 2), logprobs=logs), CHAIN)
    first, second = caller.completion.logprobs or []
    assert {k: (v.logprob, v.rank) for k, v in first.items()} == {10: (-3.0, 9), 11: (-0.5, 1)}
    assert {k: (v.logprob, v.rank) for k, v in second.items()} == {11: (-0.25, 9)}
    assert caller.completion.cumulative_logprob == -3.25


def test_prompt_logprobs_of_a_prompt_computed_twice_are_those_of_one():
    caller = Caller(prompt_logprobs=0)
    chunks = [(0, [row(6, -1.0, {})]), (1, [row(7, -2.0, {})])]
    for start, rows in [*chunks, *chunks]:
        work = Work(caller.request, start, 1, [], False)
        caller.builder.add(0, work, WorkResult(prompt_logprobs=tuple(rows)), ())
    first, *others = caller.output.prompt_logprobs or []
    assert first is None
    assert [list(entry) for entry in others if entry is not None] == [[6], [7]]
    assert caller.output.metrics.first_token_s is None


def test_a_request_is_finished_when_its_last_sequence_is():
    builder = OutputBuilder("r", None, [1], None, [None, None], SpeculationMetrics(0))
    builder.finish(1, FinishReason.LENGTH)
    assert not builder.output.finished
    builder.finish(0, FinishReason.ABORT)
    assert builder.output.finished
    assert builder.output.metrics.finished_s is not None
    assert [o.finish_reason for o in builder.output.outputs] == ["abort", "length"]
