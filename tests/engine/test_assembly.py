"""What a caller is given back, step by step: from results to deltas, from deltas to outputs."""

import pytest

from outdraft.core.draft import Draft, DraftSource
from outdraft.core.outputs import RequestDelta, SequenceDelta, TargetChoice
from outdraft.core.plan import DraftChoice, TokenLogprobs, Work, WorkResult
from outdraft.core.request import BookedWork, Request
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import RequestAssembly
from outdraft.engine.engine import RequestDeltas
from outdraft.engine.inputs import InputProcessor
from tests.engine.byte_level import byte_ids, tokenizer

PLAIN, RECOVERED, BONUS = TargetChoice.PLAIN, TargetChoice.RECOVERED, TargetChoice.BONUS
NGRAM, MODEL = DraftSource.NGRAM, DraftSource.MODEL
CHAIN = DraftChoice(DraftSource.NGRAM, Draft.chain([1, 2, 3]))
TREE = DraftChoice(DraftSource.NGRAM, Draft((1, 2, 3), (0, 0, 1)))  # row 2 is below row 0
MODELS = DraftChoice(DraftSource.MODEL, num_model_drafts=3)

EOS = 1


def assembly(params: SamplingParams, token_ids: list[int]) -> RequestAssembly:
    inputs = InputProcessor(
        tokenizer(),
        vocab_size=tokenizer().get_vocab_size(),
        max_model_len=100,
        eos_token_ids=[EOS],
        seed=0,
    )
    return RequestAssembly("r", inputs.encoded(token_ids), params, inputs)


class Caller:
    """One request of one sequence: its deltas and its output."""

    def __init__(self, **params) -> None:
        self.params = SamplingParams(max_tokens=50, **params)
        self.request = Request(
            "r/0",
            [5, 6],
            self.params,
            seed=0,
            max_model_len=100,
            stop_token_ids=frozenset([EOS, *(self.params.stop_token_ids or ())]),
        )
        self.deltas = RequestDeltas("r", {"r/0": 0}, 3, lossless=True)
        self.assembly = assembly(self.params, [5, 6])
        self.output = self.assembly.output
        self.completion = self.output.outputs[0]
        self.num_stopped = 0

    def step(self, outcome: WorkResult, drafts: DraftChoice | None = None) -> None:
        """What the scheduler, the engine and the assembler do with one result."""
        work = Work(0, self.request.num_tokens - 1, 1, True, drafts)
        added: list[int] = []
        for token_id in outcome.token_ids:
            added.append(token_id)
            self.request.finish_reason = self.request.append(token_id)
            if self.request.finish_reason is not None:
                break
        self.deltas.add(BookedWork(self.request, work, outcome, tuple(added)), 0.25)
        self.num_stopped += len(self.assembly.add(self.deltas.take())[1])


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


def test_an_output_completes_the_character_that_its_prompt_only_begins():
    first, *others = byte_ids("日")
    grown = assembly(SamplingParams(max_tokens=2), [*byte_ids("a"), first])
    parts = [SequenceDelta(0, (one,), (PLAIN,)) for one in others]
    texts = []
    for part in parts:
        grown.add(RequestDelta("r", (part,), 0.0, 0, 0, 0, lossless=True))
        texts.append(grown.output.outputs[0].text)
    assert texts == ["", "日"]


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
    assert caller.num_stopped == 1


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


def test_a_stop_token_ends_the_text_even_if_it_completes_a_stop_string():
    a, b = byte_ids("ab")
    for last, reason in ((b, b), (a, "b")):
        caller = Caller(stop="b", stop_token_ids=[last])
        caller.step(WorkResult((a,) if last == b else (b,)))
        if not caller.output.finished:
            caller.step(WorkResult((b,)))
        assert (caller.completion.finish_reason, caller.completion.stop_reason) == ("stop", reason)
        assert caller.completion.text == ("a" if last == b else "")
        assert caller.num_stopped == (reason == "b")


@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_token_is_in_the_text_if_that_is_asked_for(is_included):
    a, b = byte_ids("ab")
    for last, text in ((b, "b"), (EOS, "</s>")):
        caller = Caller(
            stop_token_ids=[b],
            include_stop_str_in_output=is_included,
            skip_special_tokens=False,
        )
        caller.step(WorkResult((a, last), (0,), (a,), (0,)), CHAIN)
        assert caller.completion.text == ("a" + text if is_included else "a")
        assert caller.completion.token_ids == [a, last]


def test_the_engine_is_not_told_of_a_stop_string_at_its_own_last_token():
    caller = Caller(stop="b", speculation={"trace": True})
    caller.request.max_total = 5
    a, b, c = byte_ids("abc")
    caller.step(WorkResult((a, b, c), (0, 1), (a, b), (0, 1)), CHAIN)
    assert caller.request.finish_reason == "length"
    assert (caller.completion.finish_reason, caller.completion.stop_reason) == ("stop", "b")
    assert caller.completion.token_ids == [a, b]
    assert [step.num_emitted for step in caller.completion.trace or ()] == [2]
    assert caller.output.metrics.speculative_decoding.per_step_accepted == [2]
    assert caller.num_stopped == 0


def test_prompt_logprobs_of_a_prompt_computed_twice_are_those_of_one():
    caller = Caller(prompt_logprobs=0)
    chunks = [(0, [row(6, -1.0, {})]), (1, [row(7, -2.0, {})])]
    for start, rows in [*chunks, *chunks]:
        work = Work(0, start, 1, False)
        outcome = WorkResult(prompt_logprobs=tuple(rows))
        caller.deltas.add(BookedWork(caller.request, work, outcome, ()), 0.25)
    assert caller.output.metrics.first_token_s is None
    caller.step(WorkResult((10,)))
    first, *others = caller.output.prompt_logprobs or []
    assert first is None
    assert [list(entry) for entry in others if entry is not None] == [[6], [7]]
    caller.step(WorkResult((11,)))
    assert len(caller.output.prompt_logprobs or ()) == 3


def ended(index: int, reason: str) -> RequestDelta:
    part = SequenceDelta(index, (5,), (PLAIN,), finish_reason=reason)
    return RequestDelta("r", (part,), 1.0, 0, 0, 0, lossless=True)


def test_a_request_is_finished_when_its_last_sequence_is():
    two = assembly(SamplingParams(n=2), [1])
    two.add(ended(1, "length"))
    assert not two.output.finished
    two.add(ended(0, "abort"))
    assert two.output.finished
    assert two.output.metrics.finished_s is not None
    assert [o.finish_reason for o in two.output.outputs] == ["abort", "length"]


def test_what_comes_behind_a_stop_string_is_dropped():
    one = assembly(SamplingParams(stop="b"), [1])
    for token_id in byte_ids("abcd"):
        part = SequenceDelta(0, (token_id,), (PLAIN,), {"ngram": 1})
        one.add(RequestDelta("r", (part,), 1.0, 0, 0, 0, lossless=True))
    [completion] = one.output.outputs
    assert (completion.text, completion.token_ids) == ("a", byte_ids("ab"))
    assert one.output.metrics.speculative_decoding.num_spec_steps == 2
