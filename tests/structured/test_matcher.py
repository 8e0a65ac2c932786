import re
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outdraft.core.draft import Draft
from outdraft.core.errors import RequestError
from outdraft.core.plan import NO_DRAFT
from outdraft.structured.compiler import GrammarCompiler
from outdraft.structured.matcher import Grammar
from outdraft.structured.time_limit import TimeLimit
from tests.structured.vocabularies import (
    END,
    REGEXES,
    TOKENS,
    allowed_by_search,
    compiler,
    regex,
    tokenizer,
)

VOCAB_SIZE = len(TOKENS)


def bits(mask_W: np.ndarray) -> set[int]:
    return {v for v in range(VOCAB_SIZE) if mask_W[v // 32] >> v % 32 & 1}


def masks_of(matcher, draft: Draft = NO_DRAFT) -> np.ndarray:
    return masks_and_ends(matcher, draft)[0]


def masks_and_ends(matcher, draft: Draft) -> tuple[np.ndarray, list[int]]:
    masks_RW = np.zeros((1 + len(draft), 1), dtype=np.int32)
    ends = matcher.fill_masks(draft.token_ids, draft.parents, masks_RW)
    return masks_RW, ends


@st.composite
def trees(draw, max_size=7):
    size = draw(st.integers(0, max_size))
    parents = tuple(draw(st.integers(0, row)) for row in range(size))
    return Draft(tuple(draw(st.integers(0, END)) for _ in range(size)), parents)


def path(draft: Draft, row: int) -> list[int]:
    tokens: list[int] = []
    while row:
        tokens.append(draft.token_ids[row - 1])
        row = draft.parents[row - 1]
    return tokens[::-1]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    pattern=st.sampled_from(REGEXES),
    choices=st.lists(st.integers(0, 99), max_size=2),
    steps=st.lists(trees(), min_size=1, max_size=3),
    stop_ids=st.sampled_from([{END}, set()]),
)
def test_every_row_of_a_tree_allows_what_its_path_allows(pattern, choices, steps, stop_ids):
    matcher = compiler().compile(regex(pattern)).matcher(stop_ids)
    output: list[int] = []

    def allowed(text: list[int]) -> set[int]:
        found = allowed_by_search(pattern, text)
        return found if stop_ids else found - {END}

    for number, draft in enumerate(steps):
        masks_RW, ends = masks_and_ends(matcher, draft)
        for row in range(1 + len(draft)):
            behind = path(draft, row)
            assert masks_RW[row].any()
            can_be_reached = END not in behind and all(
                token_id in allowed(output + behind[:depth])
                for depth, token_id in enumerate(behind)
            )
            is_end = can_be_reached and not allowed(output + behind)
            assert (row in ends) == is_end
            if can_be_reached and not is_end:
                assert bits(masks_RW[row]) == allowed(output + behind)
        going_on = sorted(allowed_by_search(pattern, output) - {END})
        if number >= len(choices) or not going_on:
            break
        output.append(going_on[choices[number] % len(going_on)])
        matcher.advance(output[-1])
        if matcher.is_finished:
            break
    assert matcher.failure is None


def test_rows_behind_what_is_forbidden_or_ends_hold_something():
    matcher = compiler().compile(regex("[abc]{1,4}")).matcher({END})
    draft = Draft((0, END, 1, END, 0), (0, 1, 2, 0, 4))  # an end, one too early, more behind both
    masks_RW = masks_of(matcher, draft)
    assert [bits(masks_RW[row]) for row in (0, 1)] == [{0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5, END}]
    assert masks_RW[2:].all()


def test_the_same_tokens_end_an_output_only_where_it_may_end():
    grammar = compiler().compile(regex("ab*c?"))
    matcher = grammar.matcher({1, END})  # "b" too: the text may end wherever "b" would go on
    assert bits(masks_of(matcher)[0]) == {0, 3}  # "ab" is another token
    matcher.advance(0)
    assert bits(masks_of(matcher)[0]) == {1, 2, 4, END}
    matcher.advance(1)
    assert matcher.is_finished


def test_without_a_token_to_end_with_an_output_ends_where_nothing_can_follow():
    matcher = compiler().compile(regex("ab?")).matcher(set())
    matcher.advance(0)
    assert not matcher.is_finished
    assert bits(masks_of(matcher)[0]) == {1}
    matcher.advance(1)
    assert matcher.is_finished
    assert masks_of(matcher).any()


def test_a_draft_past_the_end_leaves_the_rows_before_it_as_they_are():
    matcher = compiler().compile(regex("(a[bc]){2}")).matcher(set())
    masks_RW, ends = masks_and_ends(matcher, Draft.chain([0, 1, 0, 2, 0, 1]))
    assert [bits(mask_W) for mask_W in masks_RW[:4]] == [{0, 3}, {1, 2}, {0, 3}, {1, 2}]
    assert ends == [4]


def test_only_the_way_to_a_dead_end_is_cut():
    matcher = compiler().compile(regex("(a[bx]|b)(c|[xyz])|aaa[xyz]")).matcher({END})
    masks_RW, ends = masks_and_ends(matcher, Draft((0, 0, 0, 1, 1), (0, 1, 2, 1, 0)))
    assert ends == [3]  # "aaa"
    assert [bits(masks_RW[row]) for row in (1, 2, 4, 5)] == [{0, 1, 4}, {0}, {2}, {2}]


def test_a_row_that_is_too_complex_is_an_end_and_the_rows_before_it_have_masks():
    rng = np.random.default_rng(0)
    num_ends = 0
    for _ in range(20):
        matcher = explosive(60).matcher({END})
        draft = Draft.chain(rng.integers(0, 2, 30).tolist())
        masks_RW, ends = masks_and_ends(matcher, draft)
        assert matcher.failure is None
        before = ends[0] if ends else len(masks_RW)
        num_ends += len(ends)
        assert all({0, 1, 3} <= bits(mask_W) <= {0, 1, 2, 3, 5} for mask_W in masks_RW[:before])
        for token_id in draft.token_ids[:2]:  # what has failed behind the draft is repaired
            matcher.advance(token_id)
        assert bits(masks_of(matcher)[0]) >= {0, 1, 3}
    assert num_ends == 20


def test_nothing_can_follow_where_no_token_has_the_letters():
    matcher = compiler().compile(regex("ab?[xyz]?")).matcher(set())
    matcher.advance(3)
    assert matcher.is_finished


def test_where_only_the_end_is_left_it_is_forced():
    matcher = compiler().compile(regex("ab")).matcher({END})
    matcher.advance(3)
    assert not matcher.is_finished
    assert bits(masks_of(matcher)[0]) == {END}
    matcher.advance(END)
    assert matcher.is_finished


def test_a_stop_token_cuts_an_output_that_only_it_could_go_on_with():
    matcher = compiler().compile(regex("aab?c|b")).matcher({0, 3, 5, END})
    assert bits(masks_of(matcher)[0]) == {1}
    matcher = compiler().compile(regex("aab?c")).matcher({0, 3, 5, END})
    masks_RW = masks_of(matcher, Draft.chain([0, 0, 2]))
    assert bits(masks_RW[0]) == {0, 5}
    assert masks_RW.all()
    matcher.advance(0)
    assert matcher.is_finished
    assert matcher.failure is None


def test_a_token_against_the_grammar_and_a_dead_end_are_failures():
    grammar = compiler().compile(regex("a[xyz]|abc"))
    wrong, dead = grammar.matcher({END}), compiler().compile(regex("a[xyz]|c")).matcher({END})
    wrong.advance(2)
    assert wrong.failure is not None
    dead.advance(0)
    assert dead.failure is None
    assert masks_of(dead).all()
    assert dead.failure is not None


def test_sequences_of_one_grammar_do_not_touch_each_other():
    grammar = compiler().compile(regex("(ab|c)*"))
    first, second = grammar.matcher({END}), grammar.matcher({END})
    masks_of(first, Draft.chain([0, 1, 2]))
    first.advance(0)
    assert bits(masks_of(first)[0]) == {1, 4}
    assert bits(masks_of(second)[0]) == {0, 2, 3, END}


def explosive(max_states: int) -> Grammar:
    """Its lexer learns a new state with nearly every letter, and may learn only so many."""
    made = LLTokenizer(tokenizer().to_str(), n_vocab=VOCAB_SIZE, eos_token=END)
    limits = LLParserLimits(max_lexer_states=max_states, verbose_errors=False)
    source = LLMatcher.grammar_from_regex("(a|b)*a(a|b){25}c")
    return Grammar(lambda: LLMatcher(made, source, log_level=0, limits=limits), END, TimeLimit(60))


def test_a_lexer_that_is_full_is_replaced_without_a_trace():
    grammar = explosive(2000)
    rng = np.random.default_rng(0)
    fresh = grammar.start
    for _ in range(40):
        matcher = grammar.matcher({END})
        for _ in range(100):
            chain = Draft.chain(rng.integers(0, 2, 3).tolist())
            masks_RW = masks_of(matcher, chain)
            assert all({0, 1, 3} <= bits(mask_W) for mask_W in masks_RW)
            matcher.advance(chain.token_ids[0])
        assert matcher.failure is None
    assert grammar.start is not fresh  # else this has tested nothing


def test_a_grammar_that_even_an_empty_lexer_cannot_follow_fails():
    grammar = explosive(40)
    matcher = grammar.matcher({END})
    rng = np.random.default_rng(0)
    for _ in range(60):
        masks_of(matcher)
        matcher.advance(int(rng.integers(0, 2)))
    assert matcher.failure is not None


def test_a_grammar_that_takes_too_long_fails_and_nobody_waits_for_it_again(monkeypatch):
    made = GrammarCompiler(tokenizer(), VOCAB_SIZE)
    slow, quick = made.compile(regex("[ab]*")), made.compile(regex("[abc]*"))
    first, second, other = slow.matcher({END}), slow.matcher({END}), quick.matcher({END})
    may_end = threading.Event()

    def never(*_: object) -> list[int]:
        while not may_end.is_set():
            pass
        return []

    monkeypatch.setattr(first, "_masks", never)
    slow.limit.limit_s = 0.01
    assert masks_of(first).all()
    assert "more than 0.01 s" in first.failure
    slow.limit.limit_s = 60
    assert masks_of(second).all()
    assert second.failure == first.failure
    with pytest.raises(RequestError, match=re.escape(first.failure)):
        made.compile(regex("[ab]*"))
    assert bits(masks_of(other)[0]) == {0, 1, 2, 3, 4, 5, END}  # while the first one still runs
    assert other.failure is None
    may_end.set()


@pytest.mark.parametrize("extra", [0, 1, 40])
def test_a_model_with_more_ids_than_its_tokenizer_never_gets_the_others(extra: int):
    size = VOCAB_SIZE + extra
    made = GrammarCompiler(tokenizer(), size).compile(regex("[abc]*"))
    masks_RW = np.zeros((1, -(-size // 32)), dtype=np.int32)
    made.matcher({END}).fill_masks((), (), masks_RW)
    assert {v for v in range(size) if masks_RW[0, v // 32] >> v % 32 & 1} == set(range(7))
