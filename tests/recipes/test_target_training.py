"""What the embedded target learns from."""

import numpy as np
import pytest
from train_target import epoch_batch


@pytest.mark.parametrize(("batch", "length"), [(3, 7), (4, 10), (5, 25)])
def test_an_epoch_shows_every_window_once_and_epochs_differ_in_their_order(batch, length):
    tokens = np.arange(1001, dtype=np.uint16)
    windows = 1000 // length
    steps = range(-(-2 * windows // batch))
    shown = np.concatenate([epoch_batch(tokens, step, batch, length, 0).numpy() for step in steps])
    first, second = shown[:windows, 0], shown[windows : 2 * windows, 0]
    assert sorted(first) == sorted(second) == list(range(0, windows * length, length))
    assert list(first) != list(second)
    assert (np.diff(shown) == 1).all()
    assert shown.shape[1] == length + 1
