"""A drafter of another tokenizer changes no output and no distribution."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from outdraft.config.engine import EngineConfig
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.device.translated_model import TranslatedModel
from outdraft.engine.llm import LLM
from outdraft.loading.models import LoadedModels, load_models
from tests.engine.trained_tokenizers import byte_level, sentencepiece_bpe, sentencepiece_unigram
from tests.folders import new_folder
from tests.models.checkpoints import llama, randomised, save
from tests.oracle.engines import greedy, ids, run, with_kernels
from tests.oracle.test_distribution import ALPHA, chances, every_text, p_value

KINDS = {
    "byte-level": lambda: byte_level(420),
    "byte-level-larger": lambda: byte_level(600, ("<|end|>", "<s>")),
    "bpe": lambda: sentencepiece_bpe(480),
    "unigram": lambda: sentencepiece_unigram(500),
}
PAIRS = [
    ("byte-level", "byte-level-larger"),
    ("byte-level", "bpe"),
    ("unigram", "byte-level"),
]
TEXTS = ("The target verifies what the drafter ", "héllo 日本", "a b a b a")


@cache
def tokenizer(kind: str) -> Tokenizer:
    return KINDS[kind]()


@cache
def checkpoint(kind: str, num_layers: int) -> Path:
    """Tiny and random, with a few more ids than its tokenizer has."""
    own = tokenizer(kind)
    size = own.get_vocab_size() + num_layers
    oracle = randomised(llama(vocab_size=size, num_hidden_layers=num_layers), seed=num_layers)
    path = save(oracle.bfloat16().float(), new_folder() / kind)
    own.save(str(path / "tokenizer.json"))
    return path


def config(
    target: Path,
    drafter: Path | None,
    num_drafts: int = 3,
    max_num_seqs: int = 4,
    kernels: str = "auto",
    **keys: Any,
) -> EngineConfig:
    speculative: dict[str, Any] | None = None
    if drafter is not None:
        speculative = {
            "method": "draft_model",
            "model": str(drafter),
            "num_speculative_tokens": num_drafts,
            "control": "fixed",
            **keys,
        }
    return EngineConfig.from_options(
        model=str(target),
        speculative_config=speculative,
        dtype="float32",
        device="cpu",
        kernels=kernels,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=6 * max_num_seqs,
        num_blocks=4 * max_num_seqs + 40,
        seed=17,
    )


@cache
def models(target: Path, drafter: Path, kernels: str = "auto") -> LoadedModels:
    return load_models(config(target, drafter, kernels=kernels))


def engine(target: Path, drafter: Path, num_drafts: int, **keys: Any) -> LLM:
    """Without drafts it decodes plainly. `keys`: of the speculation, max_num_seqs and kernels."""
    chosen = config(target, drafter if num_drafts else None, num_drafts, **keys)
    return LLM.from_config(chosen, models(target, drafter, chosen.kernels))


@pytest.mark.parametrize(
    ("own", "other", "num_drafts", "kernels"),
    with_kernels(
        [(*kinds, number) for kinds in PAIRS for number in (1, 2, 3, 4)], [(*PAIRS[0], 3)]
    ),
)
def test_greedy_ids_are_those_of_plain_decoding(
    own: str, other: str, num_drafts: int, kernels: str
):
    target, drafter = checkpoint(own, 3), checkpoint(other, 1)
    loaded = models(target, drafter, kernels).drafter
    assert loaded is not None
    assert isinstance(loaded.network, TranslatedModel)
    prompts = [tokenizer(own).encode(text).ids[:40] for text in TEXTS]
    want = ids(run(engine(target, drafter, 0, kernels=kernels), prompts, greedy(20)))
    llm = engine(target, drafter, num_drafts, kernels=kernels)
    assert ids(run(llm, prompts, greedy(20))) == want
    assert llm.engine.stats.num_draft_tokens > 0


def words(names: list[str]) -> Tokenizer:
    """Without a token for what it does not know."""
    return Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="?"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_with_other_ids_accepts_everything(temperature: float, tmp_path: Path):
    """At temperature 1 too: its q is the target's p."""
    size = 61
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    paths = tmp_path / "target", tmp_path / "drafter"
    for path in paths:
        oracle = randomised(llama(vocab_size=size)).bfloat16().float()
        names = [f"w{i}" for i in range(size)]
        if path == paths[1]:
            names = [f"w{i}" for i in order.tolist()]
            for table in (oracle.get_input_embeddings(), oracle.lm_head):
                table.weight.data = table.weight.data[order]
        save(oracle, path)
        words(names).save(str(path / "tokenizer.json"))
    llm = engine(*paths, num_drafts=4)
    params = SamplingParams(temperature=temperature, max_tokens=26, ignore_eos=True)
    run(llm, [[5, 9, 33], [40, 2], [7] * 11], params)
    stats = llm.engine.stats
    assert stats.num_draft_tokens >= 3 * 20
    if temperature == 0:
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    else:  # rounding decides now and then
        assert stats.num_accepted_tokens >= 0.95 * stats.num_draft_tokens


# Texts of five tokens at temperature 1, of a vocabulary of which the drafter knows three quarters.

NAMES, DRAFTER_NAMES = ["a", "b", "c", "d"], ["x", "c", "a", "y", "b"]
NUM_TOKENS, NUM_TEXTS = 5, 8_000
PROMPT = [2, 3, 1, 3, 1, 3]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    folder = tmp_path_factory.mktemp("small")
    made = []
    for layers, names in ((2, NAMES), (1, DRAFTER_NAMES)):
        oracle = randomised(llama(vocab_size=len(names), num_hidden_layers=layers), seed=layers)
        oracle.get_input_embeddings().weight.data.mul_(0.5)
        oracle.lm_head.weight.data.mul_(0.25)
        made.append(oracle)
        words(names).save(str(save(oracle, folder / str(layers)) / "tokenizer.json"))
    return folder / "2", folder / "1", made[0]


def exact(oracle: Any) -> np.ndarray:
    """Probability of every text, in the order of `product`."""
    return chances(*every_text(oracle, PROMPT, len(NAMES), NUM_TOKENS))


def counts(paths: tuple[Path, Path], **keys: Any) -> np.ndarray:
    llm = engine(*paths, num_drafts=3, max_num_seqs=100, **keys)
    params = SamplingParams(n=100, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = np.zeros((len(NAMES),) * NUM_TOKENS)
    for output in llm.generate([PROMPT] * (NUM_TEXTS // 100), params, use_tqdm=False):
        for completion in output.outputs:
            found[tuple(completion.token_ids)] += 1
    stats = llm.engine.stats
    assert stats.num_draft_tokens > 1.2 * stats.num_drafts > 0.6 * NUM_TEXTS
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    return found.ravel()


CASES = {
    "block": {"rejection_sample_method": "block"},
    "token": {"rejection_sample_method": "token"},
    "drafter-invariant": {"rejection_sample_method": "drafter_invariant"},
    "greedy-drafts": {"draft_sample_method": "greedy"},
}


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_texts_follow_the_targets_distribution(case: str, small: tuple[Path, Path, Any]):
    assert p_value(counts(small[:2], **CASES[case]), exact(small[2])) > ALPHA
