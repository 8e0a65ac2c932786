"""The tree of finished texts against counting by scans."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.config.speculation import SuffixConfig
from outdraft.drafting.host.best_first import new_tree
from outdraft.drafting.host.suffix import LEARNED_PER_CALL, LEARNED_SHARE, SuffixProposer
from outdraft.drafting.host.suffix_draft import Finished, Rule, draft_finished
from outdraft.drafting.host.suffix_tree import SuffixTree
from outdraft.drafting.host.suffix_tree_update import (
    BEST_CHILD,
    COUNT,
    FIRST_CHILD,
    LENGTH,
    NEXT,
    NONE,
    ROOT,
    STALE,
)
from tests.reference.brute_suffix import speculate


def proposer() -> SuffixProposer:
    return SuffixProposer(SuffixConfig())


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def add(tree: SuffixTree, tokens: list[int]) -> None:
    tree.add(array(tokens))
    tree.count(len(tokens))


def remove_oldest(tree: SuffixTree) -> None:
    tree.remove_oldest(10**9)


def draft_from(
    tree: SuffixTree, context: list[int], max_tokens: int, rule: tuple[int, float, float]
) -> tuple[np.ndarray, float]:
    """Token ids and parents [2, K], and the score, of a draft from finished texts."""
    draft = np.zeros(1 + 2 * max_tokens, np.int32)
    score = draft_finished(
        Finished(*tree.arrays),
        array(context[-(rule[0] - 1) :]),
        max_tokens,
        Rule(rule[0], float(rule[1]), float(rule[2])),
        0.0,
        new_tree(),
        draft,
    )
    size = draft[0]
    return draft[1 : 1 + 2 * size].reshape(2, size), score


def texts(max_token: int, min_size: int = 0, max_size: int = 40):
    return st.lists(st.integers(0, max_token), min_size=min_size, max_size=max_size)


rules = st.tuples(
    st.integers(2, 9), st.sampled_from([0.0, 0.5, 1.0, 1.7, 4.0]), st.sampled_from([0, 0.1, 0.4, 1])
)


@settings(deadline=None, max_examples=150)  # the first call compiles
@given(st.lists(texts(2, 1, 12), min_size=1, max_size=5), texts(2), rules, st.integers(1, 6))
def test_finished_texts_draft_like_counting_in_those_that_are_kept(
    finished: list[list[int]], context: list[int], rule: tuple[int, float, float], max_tokens: int
) -> None:
    tree = SuffixTree(rule[0])
    kept: list[list[int]] = []
    for text in finished:
        if len(kept) == 3:
            remove_oldest(tree)
            kept.pop(0)
        add(tree, text)
        kept.append(text)
        draft, draft_score = draft_from(tree, context, max_tokens, rule)
        assert (draft[0].tolist(), draft_score) == speculate(list(context), kept, max_tokens, *rule)


def shape(tree: SuffixTree) -> dict[tuple[int, ...], tuple[int, int]]:
    """Every node's string -> (count, first token of the best child, -1 without children)."""
    found: dict[tuple[int, ...], tuple[int, int]] = {}

    def label(node: int) -> tuple[int, ...]:
        start = tree._label_starts[node]
        places = np.arange(start, start + tree._nodes[node, LENGTH]) & (len(tree._ring_C) - 1)
        return tuple(tree._ring_C[places].tolist())

    def walk(node: int, string: tuple[int, ...]) -> None:
        children = []
        child = tree._nodes[node, FIRST_CHILD]
        while child != NONE:
            children.append(child)
            walk(child, string + label(child))
            child = tree._nodes[child, NEXT]
        best = tree._nodes[node, BEST_CHILD]
        if best == STALE and children:
            best = max(children, key=lambda c: (tree._nodes[c, COUNT], tree._label_starts[c]))
        best_token = label(best)[0] if children else -1
        found[string] = (int(tree._nodes[node, COUNT]), best_token)

    walk(ROOT, ())
    return found


@settings(deadline=None)
@given(st.lists(texts(2, 1, 25), min_size=1, max_size=8), st.integers(1, 3), st.integers(2, 7))
def test_removing_a_text_leaves_the_tree_that_the_others_alone_build(
    added: list[list[int]], capacity: int, depth: int
) -> None:
    tree = SuffixTree(depth)
    for i, text in enumerate(added):
        if len(tree) == capacity:
            remove_oldest(tree)
        add(tree, text)
        fresh = SuffixTree(depth)
        for other in added[max(0, i + 1 - capacity) : i + 1]:
            add(fresh, other)
        assert shape(tree) == shape(fresh)
        assert tree.num_nodes == fresh.num_nodes == len(shape(tree))
        assert tree.num_nodes <= 2 * tree.num_tokens + 1
    while len(tree):
        remove_oldest(tree)
    assert tree.num_nodes == 1


def counts_of(windows: list[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Node's string -> windows that begin with it, where a window ends or two of them part."""
    prefixes = {window[:end] for window in windows for end in range(len(window) + 1)} | {()}

    def is_node(string: tuple[int, ...]) -> bool:
        following = {w[len(string)] for w in windows if w[: len(string)] == string != w}
        return string in windows or string == () or len(following) > 1

    return {
        string: sum(window[: len(string)] == string for window in windows)
        for string in filter(is_node, prefixes)
    }


@settings(deadline=None)
@given(
    st.lists(texts(2, 1, 15), min_size=1, max_size=5),
    st.integers(2, 6),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_texts_that_come_and_go_in_pieces_are_counted_window_by_window(
    added: list[list[int]], depth: int, pieces: list[int]
) -> None:
    tree = SuffixTree(depth)
    windows: list[tuple[int, ...]] = []
    sizes = iter(pieces * 100)

    def check() -> None:
        found = {string: count for string, (count, _) in shape(tree).items() if string}
        assert found == {string: n for string, n in counts_of(windows).items() if string}

    for text in added:
        tree.add(array(text))
        for start in range(len(text)):
            windows.append(tuple(text[start : start + depth]))
        coming = len(text)
        while coming:
            coming -= (counted := tree.count(next(sizes)))
            assert counted > 0
            kept, windows[:] = list(windows), windows[: len(windows) - coming]
            check()
            windows[:] = kept
        assert tree.count(9) == 0
        if len(tree) == 2:
            while len(tree) == 2:
                del windows[: tree.remove_oldest(next(sizes))]
                check()


def test_memory_stays_bounded_while_texts_come_and_go() -> None:
    rng = np.random.default_rng(0)
    tree = SuffixTree(12)
    for i in range(60):
        if len(tree) == 4:
            remove_oldest(tree)
        add(tree, rng.integers(0, 1 + i % 7 * 30, 700).tolist())
        if i == 30:
            num_bytes = tree.num_bytes
    assert tree.num_bytes <= num_bytes


def test_a_long_text_is_learned_a_bounded_number_of_tokens_a_call_and_whole() -> None:
    text = np.random.default_rng(0).integers(0, 30, 20_000).astype(np.int32)
    ours, at_once = proposer(), SuffixTree(24)
    ours.finish("a", text)
    assert ours.num_to_learn == 20_000
    text_before = text.copy()
    text[:] = 0  # the caller's own array
    calls = 0
    while (left := ours.num_to_learn) > 0:
        ours.propose([])
        calls += 1
        assert 0 < left - ours.num_to_learn <= max(LEARNED_PER_CALL, left // LEARNED_SHARE)
    assert 20_000 / LEARNED_PER_CALL / 2 < calls <= 20_000 / LEARNED_PER_CALL + 1
    add(at_once, text_before.tolist())
    assert shape(ours._finished) == shape(at_once)
