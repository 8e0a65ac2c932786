"""Training runs of the draft heads can be stopped and gone on with."""

import argparse

import numpy as np
import pytest
import torch
import train as recipe
from acceptance import Judge
from heads import HEADS, new_head

TEXT = np.random.default_rng(0).integers(2, 48, 400).astype(np.uint16)


class Stopped(Exception):
    pass


def run(name, target, out):
    args = argparse.Namespace(
        out=out,
        steps=4,
        warmup_steps=1,
        decay_steps=2,
        short_steps=1,
        batch_tokens=60,
        length=20,
        matrix_lr=0.02,
        vocabulary_lr=2e-3,
        overlap_share=0.8,
        seed=0,
        evaluate_every=2,
    )
    out.mkdir(exist_ok=True)
    torch.manual_seed(0)
    head = new_head(name, target, TEXT)
    rows = torch.from_numpy(TEXT[:40].astype(np.int64)).view(2, 20)
    judge = Judge(target, rows, prompt_length=8, num_drafts=4)
    recipe.train(head, target, TEXT, TEXT.reshape(20, 20), (judge, judge), args)
    return head.state_dict()


@pytest.mark.parametrize("name", list(HEADS))
def test_a_stopped_run_ends_with_the_weights_of_one_that_was_not(
    target, name, tmp_path, monkeypatch
):
    whole = run(name, target, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "measure", lambda *_: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):  # behind the checkpoint of step 2
            run(name, target, tmp_path / "stopped")
    resumed = run(name, target, tmp_path / "stopped")
    for key, tensor in whole.items():
        assert torch.equal(tensor, resumed[key]), key
    start = new_head(name, target, TEXT).state_dict()
    assert any(not torch.equal(start[key], whole[key]) for key in whole)
