"""Drafts and the arithmetic of their trees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outdraft.core.draft import MAX_DRAFTS, Draft, DraftSource
from outdraft.core.plan import DraftChoice
from tests.reference.draft_trees import ancestor_masks, tree_depths


@st.composite
def parent_lists(draw) -> tuple[int, ...]:
    size = draw(st.integers(0, MAX_DRAFTS))
    return tuple(draw(st.integers(0, row)) for row in range(size))


def path(parents: tuple[int, ...], row: int) -> list[int]:
    """Drafted rows from `row` up to the root, one step at a time."""
    rows = []
    above = row + 1
    while above:
        rows.append(above - 1)
        above = parents[above - 1]
    return rows


@given(parent_lists())
def test_depths_and_masks_are_those_of_the_walk_to_the_root(parents):
    paths = [path(parents, row) for row in range(len(parents))]
    assert tree_depths(parents) == [len(rows) for rows in paths]
    assert ancestor_masks(parents) == [sum(2**row for row in rows) for rows in paths]


@given(parent_lists())
def test_masks_fit_into_an_int64(parents):
    assert all(0 < mask < 2**63 for mask in ancestor_masks(parents))


@given(parent_lists(), st.integers(0, 70))
def test_the_first_rows_of_a_tree_are_a_tree(parents, num_tokens):
    draft = Draft(tuple(range(len(parents))), parents, score=float(len(parents)))
    first = draft.truncated(num_tokens)
    assert first.token_ids == draft.token_ids[:num_tokens]
    assert first.parents == parents[:num_tokens]
    assert first.score == min(len(parents), num_tokens)


@given(st.lists(st.integers(0, 99), max_size=MAX_DRAFTS))
def test_a_chain_is_a_tree_in_which_everyone_has_at_most_one_child(token_ids):
    draft = Draft.chain(token_ids)
    assert draft.is_chain
    assert list(draft.token_ids) == token_ids
    assert tree_depths(draft.parents) == list(range(1, len(token_ids) + 1))


def test_a_branch_makes_a_draft_no_chain():
    assert not Draft((1, 2), (0, 0)).is_chain


def test_no_draft_is_empty_and_false():
    assert len(Draft()) == 0
    assert not Draft()


@pytest.mark.parametrize("parents", [(1,), (0, 2), (-1,)])
def test_a_parent_must_precede_its_child(parents):
    with pytest.raises(ValueError, match="earlier row"):
        Draft((1,) * len(parents), parents)


def test_every_token_needs_a_parent():
    with pytest.raises(ValueError, match="2 tokens but 1 parents"):
        Draft((1, 2), (0,))


def test_a_draft_fits_into_the_bits_of_a_mask():
    Draft.chain([1] * MAX_DRAFTS)
    with pytest.raises(ValueError, match="at most 63"):
        Draft.chain([1] * (MAX_DRAFTS + 1))


@pytest.mark.parametrize(
    "choice",
    [
        DraftChoice(DraftSource.NGRAM, Draft.chain([1, 2, 3])),
        DraftChoice(DraftSource.MODEL, num_model_drafts=3),
    ],
)
def test_a_choice_of_either_kind_is_cut_from_behind(choice):
    assert len(choice) == 3
    assert choice.truncated(5) == choice
    shorter = choice.truncated(2)
    assert shorter is not None
    assert len(shorter) == 2
    assert shorter.source is choice.source
    assert shorter.draft.token_ids == choice.draft.token_ids[:2]
    assert choice.truncated(0) is None
    assert choice.truncated(-1) is None


def test_one_source_drafts_for_a_request_in_a_step():
    with pytest.raises(ValueError, match="not two"):
        DraftChoice(DraftSource.NGRAM, Draft.chain([1]), num_model_drafts=2)


def test_the_first_levels_of_a_tree_are_a_tree():
    tree = Draft((1, 2, 3, 4, 5), (0, 1, 0, 2, 3), 3.5, match_length=7)
    assert tree.level_sizes() == (2, 2, 1)
    first = tree.first_levels(2)
    assert (first.token_ids, first.parents) == ((1, 2, 3, 5), (0, 1, 0, 3))
    assert (first.score, first.match_length) == (2, 7)
    assert tree.first_levels(3) is tree
    assert Draft.chain([1, 2, 3]).first_levels(2) == Draft.chain([1, 2])
