"""At temperature 1, texts of a given form have the target's distribution among the allowed tokens.

All texts of up to four tokens over a vocabulary of seven are counted and compared with their exact
probabilities: transformers' logits, and what Python's own regular expressions allow behind each
prefix.
"""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outdraft.core.errors import GenerationError
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM
from outdraft.scheduling import scheduler as grammar_masks
from tests.models.checkpoints import llama, randomised, save
from tests.oracle.test_distribution import ALPHA, CASES, blocks_for, folder_of, p_value
from tests.pairwise import some
from tests.structured.vocabularies import (
    END,
    TOKENS,
    allowed_by_search,
    regex,
    tokenizer,
)

LIKE_OTHERS = (
    *("suffix", "ngram-tree", "greedy-drafts", "eagle", "eagle3", "eagle3-token", "p-eagle"),
    *("medusa", "medusa-tree", "mlp_speculator", "self", "self-tree", "self-sparse"),
    *("dflash", "dflash-tree", "dspark", "dspark-token"),
)
PATTERN, NUM_TOKENS, NUM_TEXTS = "(aab?|c|b){0,9}", 4, 6_000
PROMPT = [0, 1, 2, 2, 0, 1, 2, 2, 0]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    folder = tmp_path_factory.mktemp("structured")
    options = {"vocab_size": len(TOKENS), "eos_token_id": END}
    target, drafter = (
        randomised(llama(num_hidden_layers=layers, **options), seed=layers) for layers in (2, 1)
    )
    for model, name in ((target, "target"), (drafter, "drafter")):
        model.get_input_embeddings().weight.data.mul_(0.5)
        model.lm_head.weight.data.mul_(0.25)
        tokenizer().save(str(save(model, folder / name) / "tokenizer.json"))
    return folder / "target", folder / "drafter", target


@pytest.fixture(scope="module")
def exact(checkpoints: tuple[Path, Path, Any]) -> dict[tuple[int, ...], float]:
    """Probability of every text that can be."""
    texts: dict[tuple[int, ...], float] = {}
    open_texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for text, mass in open_texts.items():
            with torch.no_grad():
                logits_V = checkpoints[2](torch.tensor([[*PROMPT, *text]])).logits[0, -1].double()
            allowed = sorted(allowed_by_search(PATTERN, list(text)))
            probs = logits_V[allowed].softmax(0).tolist()
            for token_id, prob in zip(allowed, probs, strict=True):
                ended = texts if token_id == END else longer
                ended[(*text, token_id)] = mass * prob
        open_texts = longer
    return texts | open_texts


def found(
    checkpoints: tuple[Path, Path, Any], case: str, kernels: str = "auto"
) -> list[tuple[int, ...]]:
    speculative = CASES[case]
    if speculative is not None and "model" in speculative:
        speculative = {**speculative, "model": str(folder_of(speculative["model"], checkpoints))}
    if speculative is not None:
        speculative = {"control": "fixed", **speculative}
    llm = LLM(
        model=str(checkpoints[0]),
        speculative_config=speculative,
        dtype="float32",
        device="cpu",
        kernels=kernels,
        max_num_seqs=100,
        **blocks_for(speculative),
        seed=5,
    )
    params = SamplingParams(n=100, max_tokens=NUM_TOKENS, structured=regex(PATTERN))
    outputs = llm.generate([PROMPT] * (NUM_TEXTS // 100), params, use_tqdm=False)
    if speculative is not None:  # the test would be idle without drafts
        assert llm.engine.stats.num_accepted_tokens > NUM_TEXTS / 20
    return [tuple(text.token_ids) for output in outputs for text in output.outputs]


def fit(texts: list[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    assert set(texts) <= set(exact)
    order = {text: place for place, text in enumerate(exact)}
    counted = np.bincount([order[text] for text in texts], minlength=len(order))
    return p_value(counted.astype(float), np.array(list(exact.values())))


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kernels"),
    some(
        [*product(CASES, ["auto"]), ("block", "reference"), ("tree", "reference")],
        [*product([c for c in CASES if c not in LIKE_OTHERS], ["auto"])],
    ),
)
def test_texts_of_a_form_follow_the_targets_distribution(
    case: str, kernels: str, checkpoints: Any, exact: Any
):
    assert p_value(np.array(list(exact.values())) * NUM_TEXTS, np.array(list(exact.values()))) > 0.9
    assert fit(found(checkpoints, case, kernels), exact) > ALPHA


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", ["ngram", "block"])
def test_drafted_rows_without_masks_are_caught(
    case: str, checkpoints: Any, exact: Any, monkeypatch: pytest.MonkeyPatch
):
    original = grammar_masks._draft
    monkeypatch.setattr(grammar_masks, "_draft", lambda *args: ((), original(*args)[1][:0]))
    with pytest.raises(GenerationError, match="can keep to its grammar no longer"):
        found(checkpoints, case)
