"""Quantised checkpoints that the transformers library computes: speculation is invisible."""

from pathlib import Path
from typing import Any

import pytest

from outdraft.engine.llm import LLM
from tests.models.checkpoints import llama, randomised, save
from tests.models.quantized.families import EXPERTS, save_family, save_gpt_oss
from tests.models.quantized.writers import gptq
from tests.oracle.engines import greedy, ids, prompts_of, run, tokenizer

LENGTHS, NUM_TOKENS = (3, 21, 40), 20


def answers(path: Path, speculative: dict[str, Any] | None) -> list[list[int]]:
    llm = LLM(
        str(path),
        dtype="float32",
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=24,
        num_blocks=64,
        cost_table="roofline",
        speculative_config=speculative,
    )
    return ids(run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS)))


@pytest.mark.parametrize("name", ["gptq", "mxfp4"])
def test_ids_are_those_of_plain_decoding(name: str, tmp_path: Path) -> None:
    """With codes of experts: drafts of the same checkpoint, of another model, and looked up."""
    target = tmp_path / "target"
    if name == "gptq":
        save_family("qwen-3-moe", target, gptq(group=32), rounds=False, **EXPERTS)
    else:
        save_gpt_oss(target)
    drafter = save(randomised(llama(num_hidden_layers=1), seed=5), tmp_path / "drafter")
    for path in (target, drafter):
        tokenizer().save(str(path / "tokenizer.json"))
    plain = answers(target, None)
    tree = {"tree_levels": [2, 3, 1]}
    for speculative in (
        {"method": "draft_model", "model": str(target), **tree},
        {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 3},
        {"method": "suffix", "branching": 3},
    ):
        assert answers(target, speculative) == plain
