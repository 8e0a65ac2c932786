"""How a draft head is judged: acceptance length over a text that the target wrote."""

import copy
import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from acceptance import Judge, acceptance_length, draft_loss, over_vocabulary
from hypothesis import given
from hypothesis import strategies as st
from medusa import Medusa

from tests.recipes.conftest import RECIPES


@pytest.fixture(scope="module")
def verification_steps():
    """The embedded pair's own count of steps, for greedy text."""
    path = RECIPES / "embedded_pair" / "measure_acceptance.py"
    spec = importlib.util.spec_from_file_location("pair_acceptance", Path(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.verification_steps


@given(right=st.lists(st.booleans(), min_size=1, max_size=30), num_drafts=st.integers(1, 6))
def test_of_certain_drafts_it_is_what_counting_greedy_steps_gives(
    verification_steps, right, num_drafts
):
    padded = torch.tensor([*right, *[True] * num_drafts]).float()
    chances = padded.unfold(0, num_drafts, 1)[None, : len(right)]
    expected = len(right) / verification_steps(right, num_drafts)
    assert acceptance_length(chances) == pytest.approx(expected)


def enumerated_steps(chances_TS, begin):
    """Expected steps to emit the tokens from `begin` on, by trying every run of accepted drafts."""
    left = len(chances_TS) - begin
    if left <= 0:
        return 0.0
    steps, reached = 1.0, 1.0
    for accepted, chance in enumerate(chances_TS[begin][:left]):
        steps += reached * (1 - chance) * enumerated_steps(chances_TS, begin + accepted + 1)
        reached *= chance
    longest = min(len(chances_TS[begin]), left)
    return steps + reached * enumerated_steps(chances_TS, begin + longest + 1)


@given(data=st.data(), num_tokens=st.integers(1, 6), num_drafts=st.integers(1, 3))
def test_of_uncertain_drafts_it_is_tokens_over_expected_steps(data, num_tokens, num_drafts):
    chance = st.floats(0, 1, width=32)
    rows = [
        [[data.draw(chance) for _ in range(num_drafts)] for _ in range(num_tokens)]
        for _ in range(2)
    ]
    expected = 2 * num_tokens / sum(enumerated_steps(row, 0) for row in rows)
    assert acceptance_length(torch.tensor(rows)) == pytest.approx(expected, rel=1e-5)


def test_a_head_that_knew_the_target_would_have_every_draft_accepted(target):
    """Oracle head: the target's own logits, moved to the places that the drafts are judged at. In
    float64, where the sums of probabilities are 1 on every processor."""
    target = copy.deepcopy(target).double()
    ids = torch.randint(2, 48, (2, 20), generator=torch.Generator().manual_seed(0))

    class Oracle:
        draft_ids = None

        def __call__(self, states, ids_BL, num_drafts):
            roots = ids_BL.shape[1] - num_drafts
            return [states.logits[:, 1 + s : 1 + s + roots] for s in range(num_drafts)]

    chances = Judge(target, ids, prompt_length=5, num_drafts=3).accept_chances(Oracle())
    assert chances["sampled"].shape == (2, 14, 3)
    places = [(t, s) for t, s in itertools.product(range(14), range(3)) if t + s < 14]
    for token, step in places:
        assert chances["sampled"][:, token, step].tolist() == pytest.approx([1, 1])
        assert chances["overlap"][:, token, step].tolist() == pytest.approx([1, 1])
        agrees = target(ids).logits[:, 5 + token + step].argmax(-1) == ids[:, 6 + token + step]
        assert chances["greedy"][:, token, step].tolist() == agrees.float().tolist()


def test_tokens_that_a_head_has_no_name_for_get_no_probability(target):
    head = Medusa.from_target(target)
    head.draft_ids = torch.tensor([1, 4, 40])
    full = over_vocabulary(head, torch.tensor([[[0.0, 1.0, 2.0]]]), 48)
    assert full.sum().item() == pytest.approx(1)
    assert full.nonzero()[:, -1].tolist() == [1, 4, 40]
    assert full[0, 0, 40] > full[0, 0, 4] > full[0, 0, 1]


def test_the_loss_mixes_cross_entropy_with_the_chance_of_rejection():
    wanted = torch.tensor([[[0.5, 0.2, 0.1]]])  # 0.2 on tokens outside the draft vocabulary
    drafted = torch.tensor([[[0.25, 0.25, 0.5]]])
    cross_entropy = -(wanted * drafted.log()).sum()
    rejected = torch.tensor(1 - (0.25 + 0.2 + 0.1))
    for share in (0.0, 0.3, 1.0):
        expected = (1 - share) * cross_entropy + share * rejected
        torch.testing.assert_close(draft_loss(drafted.log(), wanted, share), expected)
