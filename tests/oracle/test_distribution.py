"""End to end, at temperature 1, the engine's texts have the target's own distribution.

All texts of five tokens over a vocabulary of three are counted and compared with their exact
probabilities by transformers: the first token comes plain, the others in one to four drafted steps.
Deliberately wrong samplers must be caught by the same test.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from scipy.stats import chisquare

from outdraft.control.policy import LengthPolicy
from outdraft.core.decision import LiveStop
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.device.asks import DraftModelAsk
from outdraft.drafting.device.proposer import DeviceProposer
from outdraft.engine.llm import LLM
from outdraft.kernels.data.drafts import DraftBatch
from tests.models.checkpoints import llama, randomised, save
from tests.oracle.changing_lengths import ChangingLengths
from tests.oracle.heads import random_head
from tests.pairwise import some
from tests.ranks import Spread, spread_models

VOCAB_SIZE, NUM_TOKENS, NUM_TEXTS = 3, 5, 4_000
PROMPT = [1, 2, 0, 2, 0, 2]
PENALTY, TOP_K = 0.8, 2
ALPHA = 1e-6


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    folder = tmp_path_factory.mktemp("distribution")
    target, drafter = (
        randomised(llama(vocab_size=VOCAB_SIZE, num_hidden_layers=layers), seed=layers)
        for layers in (2, 1)
    )
    for model in (target, drafter):
        model.get_input_embeddings().weight.data.mul_(0.5)
        model.lm_head.weight.data.mul_(0.25)
    return save(target, folder / "target"), save(drafter, folder / "drafter"), target


def exact(checkpoints: tuple[Path, Path, Any], with_parameters: bool = False) -> np.ndarray:
    """Probability of every text, in the order of `product`."""
    texts, logits = every_text(checkpoints[2], PROMPT, VOCAB_SIZE, NUM_TOKENS)
    if with_parameters:
        for place in range(1, NUM_TOKENS):
            was_there = torch.nn.functional.one_hot(texts[:, :place], VOCAB_SIZE).amax(1)
            logits[:, place] -= PENALTY * was_there
        least = logits.topk(TOP_K, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return chances(texts, logits)


def every_text(
    oracle: Any, prompt: list[int], vocab_size: int, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """All texts in the order of `product`, and the logits of their tokens, in float64: in float32
    their probabilities would not quite add up to 1."""
    texts = torch.tensor(list(product(range(vocab_size), repeat=num_tokens)))
    whole = torch.cat([torch.tensor([prompt]).expand(len(texts), -1), texts], dim=1)
    with torch.no_grad():
        return texts, deepcopy(oracle).double()(whole).logits[:, len(prompt) - 1 : -1]


def chances(texts: torch.Tensor, logits: torch.Tensor) -> np.ndarray:
    return logits.log_softmax(-1).gather(2, texts[:, :, None]).sum((1, 2)).exp().numpy()


def counts(
    checkpoints: tuple[Path, Path, Any],
    speculative: dict[str, Any] | None,
    control: LengthPolicy | None = None,
    kernels: str = "auto",
    sizes: tuple[int, int] | None = None,
    **changes: Any,
) -> np.ndarray:
    """`sizes`: of the target and the drafter, in ranks; None: all is on one rank."""
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
        seed=17,
    )
    others = nullcontext()
    if sizes is not None:
        models = spread_models(llm.config, *sizes)
        llm = LLM.from_config(llm.config, models[0])
        others = Spread(llm, models)
    if control is not None:
        llm.engine.drafting.control = control
    params = SamplingParams(n=100, max_tokens=NUM_TOKENS, ignore_eos=True, **changes)
    found = np.zeros((VOCAB_SIZE,) * NUM_TOKENS)
    with others:
        outputs = llm.generate([PROMPT] * (NUM_TEXTS // 100), params, use_tqdm=False)
    for output in outputs:
        for completion in output.outputs:
            found[tuple(completion.token_ids)] += 1
    if speculative is not None:  # the test would be idle without drafts
        stats = llm.engine.stats
        assert stats.num_drafts > NUM_TEXTS / 2
        assert stats.num_draft_tokens > (1.2 if control is None else 1.05) * stats.num_drafts
    return found.ravel()


def blocks_for(speculative: dict[str, Any] | None) -> dict[str, int]:
    """Each has one token where drafts read a part of the text: the prompt is short."""
    if speculative is not None and "kv_budget" in speculative:
        assert speculative["kv_budget"] < len(PROMPT)
        return {"block_size": 1, "num_blocks": 2000}
    return {"num_blocks": 400}


def p_value(found: np.ndarray, exact: np.ndarray) -> float:
    """The p-value of Pearson's test; cells that expect less than 5 are merged into one."""
    expected = exact * found.sum()
    small = expected < 5
    cells = [np.append(values[~small], values[small].sum()) for values in (found, expected)]
    used = cells[1] > 0
    return float(chisquare(cells[0][used], cells[1][used]).pvalue)


def folder_of(name: str, checkpoints: tuple[Path, Path, Any]) -> Path:
    """The drafter, or a random head of that kind, made once."""
    if name == "drafter":
        return checkpoints[1]
    folder = checkpoints[0].parent / name
    return folder if folder.exists() else random_head(name, checkpoints[0], folder)


MODEL = {"method": "draft_model", "model": "drafter", "num_speculative_tokens": 3}
TREE = {"tree_levels": [2, 2, 1]}
TREE_MODEL = {"method": "draft_model", "model": "drafter"}
EAGLE3 = {"method": "eagle3", "model": "eagle3"}
MEDUSA, SPECULATOR = ({"method": m, "model": m} for m in ("medusa", "mlp_speculator"))
DFLASH, DSPARK = ({"method": m, "model": m} for m in ("dflash", "dspark"))
NUMBER = {"num_speculative_tokens": 3}
CASES = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "suffix_decoding_max_spec_factor": 3.0},
    "block": {**MODEL, "rejection_sample_method": "block"},
    "token": {**MODEL, "rejection_sample_method": "token"},
    "drafter-invariant": {**MODEL, "rejection_sample_method": "drafter_invariant"},
    "greedy-drafts": {**MODEL, "draft_sample_method": "greedy"},
    "combined": {"method": "combined", "model": "drafter", "num_speculative_tokens": 3},
    "tree": {**TREE_MODEL, **TREE},
    "tree-drafter-invariant": {
        **TREE_MODEL,
        **TREE,
        "rejection_sample_method": "drafter_invariant",
    },
    "ngram-tree": {"method": "ngram", **NUMBER, "prompt_lookup_min": 1, "branching": 2},
    "suffix-tree": {"method": "suffix", "suffix_decoding_max_spec_factor": 3.0, "branching": 2},
    "eagle": {"method": "eagle", "model": "eagle", **NUMBER},
    "eagle3": {**EAGLE3, **NUMBER},
    "eagle3-token": {**EAGLE3, **NUMBER, "rejection_sample_method": "token"},
    "eagle3-tree": {**EAGLE3, **TREE},
    "p-eagle": {"method": "eagle3", "model": "p-eagle", **NUMBER, "parallel_drafting": True},
    "medusa": {**MEDUSA, **NUMBER},
    "medusa-tree": {**MEDUSA, **TREE},
    "self": {"method": "self", "quantization": "int4", **NUMBER},
    "self-tree": {"method": "self", "quantization": "int4", **TREE},
    "self-sparse": {"method": "self", "kv_budget": 4, **NUMBER},
    "self-sparse-tree": {"method": "self", "kv_budget": 4, **TREE},
    "mlp_speculator": {**SPECULATOR, **NUMBER},
    "mlp_speculator-tree": {**SPECULATOR, **TREE},
    "dflash": {**DFLASH, **NUMBER},
    "dflash-tree": {**DFLASH, **TREE},
    "dspark": {**DSPARK, **NUMBER},
    "dspark-token": {**DSPARK, **NUMBER, "rejection_sample_method": "token"},
    "dspark-tree": {**DSPARK, **TREE},
}

CHANGING = (
    *("ngram", "suffix-tree", "block", "token", "drafter-invariant", "combined", "tree", "eagle"),
    *("eagle3-tree", "p-eagle", "medusa", "self-sparse-tree", "mlp_speculator-tree", "dspark"),
)  # one chain or tree of each source, and each rule
ON_REFERENCE = ("block", "token", "drafter-invariant", "combined", "tree", "eagle3-tree", "dspark")
ON_ALL_RANKS = ("plain", "block", "token", "combined", "tree", "eagle3", "medusa", "dspark")
STEADY = ("block", "tree", *(case for case in CASES if case not in CHANGING))


@pytest.mark.few(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        *some([(case, "auto") for case in CASES], [(case, "auto") for case in STEADY]),
        *some([(case, "reference") for case in ON_REFERENCE], [("tree", "reference")]),
    ],
)
def test_texts_follow_the_targets_distribution(case: str, kernels: str, checkpoints: Any):
    found = counts(checkpoints, CASES[case], kernels=kernels)
    assert p_value(found, exact(checkpoints)) > ALPHA


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "sizes"),
    some(
        [
            *product((case for case in CASES if not case.startswith("self")), [(2, 1)]),
            *product(ON_ALL_RANKS, [(2, 2)]),
        ],
        [
            *product(("block", "token", "tree", "eagle3", "dspark"), [(2, 1)]),
            *product(("token", "combined", "medusa", "dspark"), [(2, 2)]),
        ],
    ),
)
def test_they_do_on_two_ranks(case: str, sizes: tuple[int, int], checkpoints: Any):
    found = counts(checkpoints, CASES[case], sizes=sizes)
    assert p_value(found, exact(checkpoints)) > ALPHA


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize("case", some([case for case in CASES if case != "plain"], CHANGING))
def test_they_do_while_sources_and_lengths_change_at_every_step(case: str, checkpoints: Any):
    """Also with live rules, which look at margins before each draw."""
    control = ChangingLengths(seed=5)
    found = counts(checkpoints, CASES[case], control=control)
    assert p_value(found, exact(checkpoints)) > ALPHA
    assert control.num_mixed > 20


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["plain", "block", "token", "combined", "tree", "eagle3-tree", "medusa"]
)
def test_so_they_do_with_parameters_that_look_back_at_the_draft(case: str, checkpoints: Any):
    changes = {"presence_penalty": PENALTY, "top_k": TOP_K}
    found = counts(checkpoints, CASES[case], **changes)
    assert p_value(found, exact(checkpoints, with_parameters=True)) > ALPHA
    assert p_value(found, exact(checkpoints)) < ALPHA


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "sizes"),
    some(
        product(("block", "token", "tree", "eagle3"), (None, (2, 1))),
        [*product(("block", "token", "tree", "eagle3"), [None]), ("tree", (2, 1))],
    ),
)
def test_drafts_from_another_distribution_than_told_are_caught(
    case: str, sizes: Any, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(DeviceProposer, "propose", lying(DeviceProposer.propose))
    found = counts(checkpoints, CASES[case], sizes=sizes)
    assert p_value(found, exact(checkpoints)) < ALPHA


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", ["block", "token", "eagle3", "medusa", "mlp_speculator", "dspark"])
def test_chains_that_live_rules_end_follow_it_too(
    case: str, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
):
    num_drafts: list[int] = []
    monkeypatch.setattr(DeviceProposer, "propose", ruled(DeviceProposer.propose, num_drafts))
    found = counts(checkpoints, CASES[case])
    assert len(set(num_drafts)) > 2
    assert p_value(found, exact(checkpoints)) > ALPHA


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", ["block", "token"])
def test_chains_that_end_before_unlikely_drafts_are_caught(
    case: str, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
):
    """The probability of a drawn token is no signal, margins are one."""
    monkeypatch.setattr(DeviceProposer, "propose", cut_by_drawn(DeviceProposer.propose))
    assert p_value(counts(checkpoints, CASES[case]), exact(checkpoints)) < ALPHA


def ruled(propose: Callable[..., DraftBatch], num_drafts: list[int]) -> Callable[..., DraftBatch]:
    """Every request has a live rule."""
    stop = LiveStop((1.0, 0.8, 0.6), (0.4, 0.8, 0.8), 0.3)

    def wrapped(self: DeviceProposer, asks: Sequence[DraftModelAsk], *rest: Any) -> DraftBatch:
        drafts = propose(self, [structs.replace(ask, stop=stop) for ask in asks], *rest)
        num_drafts.extend(drafts.num_drafts_B.tolist())
        return drafts

    return wrapped


def cut_by_drawn(propose: Callable[..., DraftBatch]) -> Callable[..., DraftBatch]:
    """Chains without their first draft of a probability below 1/4, and what stands behind it."""

    def wrapped(*args: Any) -> DraftBatch:
        drafts = propose(*args)
        if drafts.probs_BNV is None:
            return drafts
        ids_BK = drafts.token_ids_BN
        own_BK = drafts.probs_BNV.gather(2, ids_BK.clamp_min(0)[:, :, None])[:, :, 0]
        stays_BK = ((own_BK >= 0.25) & (ids_BK >= 0)).long().cumprod(1).bool()
        return replace(
            drafts,
            token_ids_BN=ids_BK.masked_fill(~stays_BK, -1),
            num_drafts_B=stays_BK.sum(1),
            margins_BL=own_BK,
        )

    return wrapped


def lying(propose: Callable[..., DraftBatch]) -> Callable[..., DraftBatch]:
    """Drafts that claim to come from a distribution with sharper peaks."""

    def wrapped(*args: Any) -> DraftBatch:
        drafts = propose(*args)
        if drafts.probs_BNV is None:
            return drafts
        sharper_BKV = drafts.probs_BNV**4
        told_BKV = sharper_BKV / sharper_BKV.sum(2, keepdim=True)
        return replace(drafts, probs_BNV=told_BKV)

    return wrapped
