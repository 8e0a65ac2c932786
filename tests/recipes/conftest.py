"""Recipes are scripts that import one another by name, as if run in their own folders."""

import sys
from pathlib import Path

import pytest
import torch

RECIPES = Path(__file__).parents[2] / "recipes"
# Both folders have a measure_acceptance and an export: the names here are those of draft_heads.
sys.path[:0] = [str(RECIPES / "draft_heads"), str(RECIPES / "embedded_pair")]


@pytest.fixture(scope="session")
def target():
    """A small untrained target with as many layers as the heads tap."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)
