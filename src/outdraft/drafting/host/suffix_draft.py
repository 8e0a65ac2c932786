# pyright: reportReturnType=false
# numba makes Python's numbers of what the stubs call arrays.
"""Draft what followed a text's end, in that text and in finished ones: kernels of SuffixProposer.

For every suffix of the text that occurred before, a tree of its most probable continuations is
grown. The probability of a token is count(string + token) / count(string); that of a row is the
product along its path. The sum of a tree's probabilities is the expected number of accepted tokens.
The tree with the largest sum is drafted; of equal sums that of the longest suffix. Suffixes that
occurred at the same places have the same continuations. They count as one suffix, which may draft
as deep as the one of them that may draft deepest.

Dimension key: B requests, T tokens, R rows, A arrays of a row, F places of the drafts, C places of
the ring of texts, S places of the table.
"""

from typing import NamedTuple

import numpy as np

from outdraft.core.jit import njit
from outdraft.drafting.host.array_places import uncounted
from outdraft.drafting.host.best_first import (
    DEPTH,
    GrowingTree,
    can_take,
    clear,
    end_of,
    new_tree,
    offer,
    take,
    uncounted_tree,
    write,
)
from outdraft.drafting.host.live_texts import MAX_TOKENS, ROW, text_of
from outdraft.drafting.host.pair_table import find
from outdraft.drafting.host.suffix_automaton import (
    BEST_EDGE,
    CONTEXT,
    LINK,
    NUM_TOKENS,
    TARGET,
    Automaton,
    automaton_at,
    read,
)
from outdraft.drafting.host.suffix_automaton import COUNT as STATE_COUNT
from outdraft.drafting.host.suffix_automaton import LENGTH as STATE_LENGTH
from outdraft.drafting.host.suffix_automaton import TOKEN as EDGE_TOKEN
from outdraft.drafting.host.suffix_tree_update import (
    BEST_CHILD,
    COUNT,
    LENGTH,
    NONE,
    PARENT,
    ROOT,
    TOKEN,
    find_best_children,
)


class Rule(NamedTuple):
    """How far a draft goes.

    Attributes:
        max_depth: tokens of a match and the draft's longest path together.
        max_spec_factor: tokens of that path for each token of the match.
        min_token_prob: of a row's path.
    """

    max_depth: int
    max_spec_factor: float
    min_token_prob: float


class Finished(NamedTuple):
    """The arrays of a SuffixTree."""

    ring_C: np.ndarray
    nodes: np.ndarray
    label_starts: np.ndarray
    table_S: np.ndarray


@njit(cache=True)
def draft_all(
    asks_B4: np.ndarray,
    places_RA3: np.ndarray,
    max_depth: int,
    max_spec_factor: float,
    min_token_prob: float,
    ring_C: np.ndarray,
    nodes: np.ndarray,
    label_starts: np.ndarray,
    table_S: np.ndarray,
    drafts_F: np.ndarray,
    scores_B: np.ndarray,
) -> int:
    """Read the new tokens of every request and write the better draft of its own and others' texts.

    The first arguments are those of TextBatch, the next ones those of Rule and Finished, the last
    ones those of DraftRoom. Among equals the own text is taken. Returns how many places drafts
    take.
    """
    return _draft_each(
        uncounted(asks_B4),
        uncounted(places_RA3),
        Rule(max_depth, max_spec_factor, min_token_prob),
        Finished(uncounted(ring_C), uncounted(nodes), uncounted(label_starts), uncounted(table_S)),
        new_tree(),
        uncounted(drafts_F),
        uncounted(scores_B),
    )


@njit(cache=True)
def _draft_each(
    asks_B4: np.ndarray,
    places_RA3: np.ndarray,
    rule: Rule,
    finished: Finished,
    tree: GrowingTree,
    drafts_F: np.ndarray,
    scores_B: np.ndarray,
) -> int:
    tree = uncounted_tree(tree)
    end = 0
    for b in range(len(asks_B4)):
        automaton = automaton_at(places_RA3[asks_B4[b, ROW]])
        text_T = text_of(asks_B4[b])
        read(automaton, text_T, rule.max_depth)
        max_tokens = asks_B4[b, MAX_TOKENS]
        draft_F = drafts_F[end:]
        score = draft_own(automaton, max_tokens, rule, tree, draft_F)
        context = text_T[max(0, len(text_T) - rule.max_depth + 1) :]
        scores_B[b] = draft_finished(finished, context, max_tokens, rule, score, tree, draft_F)
        end += end_of(draft_F)
    return end


@njit(cache=True)
def _limit(match_len: int, max_tokens: int, rule: Rule) -> int:
    """How deep a match of this length may draft: match and draft together fit in max_depth."""
    return min(max_tokens, int(rule.max_spec_factor * match_len), rule.max_depth - match_len)


@njit(cache=True)
def draft_own(
    automaton: Automaton, max_tokens: int, rule: Rule, tree: GrowingTree, draft_F: np.ndarray
) -> float:
    """Write the best draft from a text's own past; return its score."""
    states = automaton.states
    clear(tree)
    write(tree, draft_F)
    best_score = 0.0
    state = automaton.fields_M[CONTEXT]
    longest = min(automaton.fields_M[NUM_TOKENS], rule.max_depth - 1)
    while state != ROOT:
        shortest = states[states[state, LINK], STATE_LENGTH] + 1
        limit = 0
        for match_len in range(shortest, min(longest, states[state, STATE_LENGTH]) + 1):
            limit = max(limit, _limit(match_len, max_tokens, rule))
        if limit > best_score:  # the rows of each depth add up to less than one
            score = _grow_own(automaton, state, limit, max_tokens, rule.min_token_prob, tree)
            if score > best_score:
                write(tree, draft_F)
                best_score = score
        state = states[state, LINK]
    return best_score


@njit(cache=True)
def _grow_own(
    automaton: Automaton,
    state: int,
    max_depth: int,
    max_tokens: int,
    min_prob: float,
    tree: GrowingTree,
) -> float:
    clear(tree)
    score = 0.0
    _offer_edge(automaton, state, BEST_EDGE, 0, min_prob, tree)
    while can_take(tree, max_tokens):
        row, parent, state, column, target = take(tree)
        score += tree.probs_K1[row]
        if tree.rows_K1C[row, DEPTH] < max_depth:
            _offer_edge(automaton, target, BEST_EDGE, row, min_prob, tree)
        _offer_edge(automaton, state, column + 1, parent, min_prob, tree)
    return score


@njit(cache=True)
def _offer_edge(
    automaton: Automaton, state: int, column: int, row: int, min_prob: float, tree: GrowingTree
) -> None:
    """Offer what a best edge of a state leads to, behind the row that led to the state."""
    states, edges, _, _, _ = automaton
    if column == states.shape[1] or states[state, column] == -1:
        return
    edge = states[state, column]
    target = edges[edge, TARGET]
    prob = tree.probs_K1[row] * (states[target, STATE_COUNT] / states[state, STATE_COUNT])
    if prob >= min_prob:
        offer(tree, prob, row, edges[edge, EDGE_TOKEN], state, column, target)


@njit(cache=True)
def draft_finished(
    finished: Finished,
    context: np.ndarray,
    max_tokens: int,
    rule: Rule,
    least_score: float,
    tree: GrowingTree,
    draft_F: np.ndarray,
) -> float:
    """Write the best draft from finished texts if its score is above `least_score`.

    Returns the score of what is written then.
    """
    best_score = 0.0
    if len(context) == 0:
        return least_score
    shortest = 1
    node, used = _locate(context[-shortest:], finished)
    while node != NONE:
        longest, longer, longer_used = _longest_alike(context, shortest, node, used, finished)
        limit = 0
        for match_len in range(shortest, longest + 1):
            limit = max(limit, _limit(match_len, max_tokens, rule))
        if limit > max(least_score, best_score):
            score = _grow_finished(
                finished, node, used, limit, max_tokens, rule.min_token_prob, tree
            )
            if score > least_score and score >= best_score:
                write(tree, draft_F)
                best_score = score
        shortest = longest + 1
        node, used = longer, longer_used
    return max(least_score, best_score)


@njit(cache=True)
def _grow_finished(
    finished: Finished,
    node: int,
    used: int,
    max_depth: int,
    max_tokens: int,
    min_prob: float,
    tree: GrowingTree,
) -> float:
    """As from the own text; the context's own occurrence counts as one without continuation."""
    clear(tree)
    score = 0.0
    _offer_next(finished, node, used, 0, min_prob, tree)
    while can_take(tree, max_tokens):
        row, parent, node, used, column = take(tree)
        score += tree.probs_K1[row]
        if tree.rows_K1C[row, DEPTH] < max_depth:
            _offer_next(finished, node, used + 1, row, min_prob, tree)
        if used == 0:
            upper = finished.nodes[node, PARENT]
            _offer_child(finished, upper, column + 1, parent, min_prob, tree)
    return score


@njit(cache=True)
def _offer_next(
    finished: Finished, node: int, used: int, row: int, min_prob: float, tree: GrowingTree
) -> None:
    """Offer what follows the first tokens of a node's label: its next token, or the best child."""
    nodes = finished.nodes
    if used == nodes[node, LENGTH]:
        find_best_children(node, nodes, finished.label_starts)
        _offer_child(finished, node, BEST_CHILD, row, min_prob, tree)
    else:
        _offer_token(finished, node, used, nodes[node, COUNT], 0, row, min_prob, tree)


@njit(cache=True)
def _offer_child(
    finished: Finished, node: int, column: int, row: int, min_prob: float, tree: GrowingTree
) -> None:
    nodes = finished.nodes
    if column == nodes.shape[1] or nodes[node, column] == NONE:
        return
    child = nodes[node, column]
    _offer_token(finished, child, 0, nodes[node, COUNT], column, row, min_prob, tree)


@njit(cache=True)
def _offer_token(
    finished: Finished,
    node: int,
    used: int,
    seen: int,
    column: int,
    row: int,
    min_prob: float,
    tree: GrowingTree,
) -> None:
    """Offer a token of a label, behind a row whose string the finished texts hold `seen` times."""
    ring_C, nodes, label_starts, _ = finished
    if row == 0:
        seen += 1
    prob = tree.probs_K1[row] * (nodes[node, COUNT] / seen)
    if prob >= min_prob:
        token = nodes[node, TOKEN]  # at hand, unlike the text
        if used > 0:
            token = ring_C[(label_starts[node] + used) & (len(ring_C) - 1)]
        offer(tree, prob, row, int(token), node, used, column)


@njit(cache=True)
def _longest_alike(
    context: np.ndarray, match_len: int, node: int, used: int, finished: Finished
) -> tuple[int, int, int]:
    """The longest match that occurs as often as a shorter one, hence at the same places.

    Matches that occur at the same places are continued alike: one walk serves them all. Returns
    its length, and where the match of one token more is, as `_locate` does.
    """
    nodes = finished.nodes
    count, newest_end = nodes[node, COUNT], finished.label_starts[node] + used
    furthest = max(match_len, _len_before(newest_end, context, finished.ring_C))
    longer, longer_used = NONE, 0
    most = tried = furthest  # where phrases come again, this is it
    while match_len < most:
        node, used = _locate(context[-tried:], finished)
        if node != NONE and nodes[node, COUNT] == count:
            match_len = tried
        else:
            most, longer, longer_used = tried - 1, node, used
        # Where it is not, one token more is too many most often.
        tried = match_len + 1 if tried == furthest else (match_len + most + 1) // 2
    if most == furthest and furthest < len(context):
        longer, longer_used = _locate(context[-furthest - 1 :], finished)
    return match_len, longer, longer_used


@njit(cache=True)
def _len_before(end: int, context: np.ndarray, ring_C: np.ndarray) -> int:
    """How many of the context's last tokens stand before a place of the ring.

    No match at this place is longer; what stands there may begin in another text, though.
    """
    mask = len(ring_C) - 1
    length = 0
    while length < len(context) and ring_C[(end - 1 - length) & mask] == context[-1 - length]:
        length += 1
    return length


@njit(cache=True)
def _locate(context: np.ndarray, finished: Finished) -> tuple[int, int]:
    """The node on whose label a string ends, and how many tokens of the label it uses."""
    ring_C, nodes, label_starts, table_S = finished
    mask = len(ring_C) - 1
    node, used = ROOT, 0
    at = 0
    while at < len(context):
        best = nodes[node, BEST_CHILD]
        if best >= 0 and nodes[best, TOKEN] == context[at]:
            node = best
        else:
            node = find(table_S, nodes, node, context[at])
            if node == NONE:
                return NONE, 0
        used = min(nodes[node, LENGTH], len(context) - at)
        for offset in range(1, used):
            if ring_C[(label_starts[node] + offset) & mask] != context[at + offset]:
                return NONE, 0
        at += used
    return node, used
