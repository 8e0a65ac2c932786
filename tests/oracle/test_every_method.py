"""One row per method, in seconds: the first thing to run after a change to speculation."""

import pytest

from outdraft.kernels.choose import kernels_options
from tests.oracle.engines import (
    FAMILIES,
    METHODS,
    engine,
    greedy,
    greedy_oracle,
    ids,
    prompts_of,
    run,
)

LENGTHS, NUM_TOKENS = (3, 21, 40, 9, 33), 30


@pytest.mark.parametrize(
    ("method", "family"),
    [(method, FAMILIES[i % len(FAMILIES)]) for i, method in enumerate(METHODS)],
)
@pytest.mark.parametrize("kernels", kernels_options())
def test_every_method_equals_transformers(method: str, family: str, kernels: str):
    llm = engine(family, method, kernels=kernels)
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle(family, LENGTHS, NUM_TOKENS)
