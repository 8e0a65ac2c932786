"""A drafter's weights in 8 or 4 bits change no output of the target."""

from itertools import product

import pytest
from torch import nn

from outdraft.core.sampling import SamplingParams
from outdraft.core.weights import QUANTIZATIONS, WeightFormat
from outdraft.engine.llm import LLM
from outdraft.loading.models import load_models
from outdraft.models.modules import linears_of
from tests.oracle.engines import (
    config,
    engine,
    greedy,
    ids,
    prompts_of,
    run,
    speculation,
    with_kernels,
)

FAMILY, PROMPTS = "mistral-window", prompts_of((19, 4, 33))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "quantization", "dtype", "kernels"),
    with_kernels(
        product(("draft_model", "eagle3", "dflash"), QUANTIZATIONS, ("float32", "bfloat16")),
        [("draft_model", QUANTIZATIONS[-1], "float32")],
    ),
)
def test_greedy_and_seeded_texts_are_those_of_plain_decoding(
    method: str, quantization: WeightFormat, dtype: str, kernels: str
):
    speculative = speculation(FAMILY, method, 3)
    assert speculative is not None
    options = {"dtype": dtype, "kernels": kernels}
    chosen = config(FAMILY, speculative | {"quantization": quantization}, **options)
    models = load_models(chosen)
    assert models.drafter is not None
    assert isinstance(models.drafter.network, nn.Module)
    kept = getattr(models.drafter.network, "fc", None) if method == "dflash" else None
    parts = [part for part in linears_of(models.drafter.network) if part is not kept]
    formats = {part.format for part in parts}
    assert formats == {quantization}
    llm, plain = LLM.from_config(chosen, models), engine(FAMILY, "plain", **options)
    seeded = SamplingParams(temperature=1.0, seed=11, max_tokens=24, ignore_eos=True)
    for params in (greedy(24), seeded):
        assert ids(run(llm, PROMPTS, params)) == ids(run(plain, PROMPTS, params))
    assert llm.engine.stats.num_drafts > 0
