"""Families whose network the transformers library computes: they answer as its `generate` does."""

import pytest

from outdraft.kernels.choose import kernels_options
from tests.models.families import CONFIGS
from tests.oracle.engines import (
    LIBRARY,
    engine,
    greedy,
    greedy_oracle,
    ids,
    prompts_of,
    run,
)

LENGTHS, NUM_TOKENS = (3, 21, 40, 9, 33), 30
METHODS = ("plain", "draft_model", "perfect-tree", "suffix-tree", "eagle3")
FAMILIES = [LIBRARY + name for name in CONFIGS]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_are_those_of_generate(family: str, method: str) -> None:
    """Prompts in chunks, with requests of other lengths beside them."""
    options = kernels_options()
    kernels = options[(FAMILIES.index(family) + METHODS.index(method)) % len(options)]
    llm = engine(family, method, kernels=kernels)
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle(family, LENGTHS, NUM_TOKENS)
