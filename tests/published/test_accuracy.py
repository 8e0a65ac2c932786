"""What rows of 8 bits change of what a published model says."""

from collections.abc import Callable
from pathlib import Path

import pytest
from accuracy import measure


@pytest.mark.slow
def test_rows_of_8_bits_hardly_change_what_a_model_says(published: Callable[[str], Path]):
    """The smallest of the models decides least clearly."""
    found = measure("smollm2", published("smollm2"), 1000)
    assert 0 < found.error < 0.08
    assert found.equal_choices > 0.96
    assert found.divergence < 0.005
    assert found.perplexities["int8"] == pytest.approx(found.perplexities["float"], rel=0.005)
