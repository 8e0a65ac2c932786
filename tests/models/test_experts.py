"""Whole models of the transformers library, their experts computed by the kernels.

The library's own code for the same model is the oracle.
"""

import copy
import logging

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeConfig,
    Llama4TextConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import ALONE, RankGroup
from outdraft.kernels.choose import REFERENCE, choose_kernels
from outdraft.models.library.checkpoint import Packing
from outdraft.models.library.experts import PackedExperts, replace_experts
from outdraft.models.library.ranks import divide_experts
from tests.ranks import on_ranks

CPU = torch.device("cpu")
COMMON = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
DEEPSEEK = COMMON | LATENT | {"v_head_dim": 8, "moe_intermediate_size": 24, "n_routed_experts": 8}
DEEPSEEK |= {"num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
QWEN = COMMON | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL = COMMON | {"num_local_experts": 5, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[PretrainedConfig, int]] = {  # and how many layers have experts
    "MixtralForCausalLM": (MixtralConfig(**LOCAL), 3),
    "Qwen2MoeForCausalLM": (Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=40), 3),
    "Qwen3MoeForCausalLM": (Qwen3MoeConfig(**QWEN), 3),
    "GptOssForCausalLM": (GptOssConfig(**LOCAL), 3),
    "DeepseekV2ForCausalLM": (DeepseekV2Config(**DEEPSEEK | {"num_key_value_heads": 4}), 2),
    "DeepseekV3ForCausalLM": (DeepseekV3Config(**DEEPSEEK | {"num_key_value_heads": 4}), 2),
    "Llama4ForCausalLM": (Llama4TextConfig(**LOCAL | {"num_experts_per_tok": 1}), 3),
    "OlmoeForCausalLM": (OlmoeConfig(**QWEN), 3),
    "GraniteMoeForCausalLM": (GraniteMoeConfig(**LOCAL), 3),
}
TOKENS_1T = torch.randint(0, 50, (1, 40), generator=torch.Generator().manual_seed(1))


def library_model(name: str, dtype: torch.dtype) -> nn.Module:
    """Random numbers in all weights and biases, of a size at which experts matter."""
    torch.manual_seed(0)
    config = copy.deepcopy(MODELS[name][0])
    config._experts_implementation = "eager"
    model = getattr(transformers, name)(config).to(dtype).eval()
    for weight in model.parameters():
        if weight.dim() != 1:
            weight.data.normal_(std=0.2)
    return model


@torch.inference_mode()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS_1T).logits[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_replaced_experts_computes_what_the_library_does(name):
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        model = library_model(name, dtype)
        want_TV = logits(model)
        replace_experts(model, Packing(choose_kernels("auto", CPU, dtype)))
        assert sum(isinstance(part, PackedExperts) for part in model.modules()) == MODELS[name][1]
        largest = float(want_TV.abs().max())
        torch.testing.assert_close(logits(model), want_TV, rtol=0, atol=bound * largest)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_with_parts_of_the_experts_compute_what_the_library_does(name):
    """All else is whole on both ranks."""
    want_TV = logits(library_model(name, torch.float64))
    model = library_model(name, torch.float64)
    whole = packed_bytes(replaced(copy.deepcopy(model), ALONE))
    assert len(whole) == MODELS[name][1]
    for size in (2, 3):
        models = [copy.deepcopy(model) for _ in range(size)]

        def part(ranks, models=models):
            own = replaced(models[ranks.target.rank], ranks.target)
            return logits(own), packed_bytes(own)

        for got_TV, packed in on_ranks(size, 1, part):
            largest = float(want_TV.abs().max())
            torch.testing.assert_close(got_TV, want_TV, rtol=0, atol=1e-12 * largest)
            assert packed == [num_bytes // size for num_bytes in whole]


def replaced(model: nn.Module, group: RankGroup) -> nn.Module:
    sums = divide_experts(model, group)
    replace_experts(model, Packing(choose_kernels("auto", CPU, torch.float64)), sums=sums)
    return model


def packed_bytes(model: nn.Module) -> list[int]:
    """What each layer's experts take."""
    return [part.packed_bytes for part in model.modules() if isinstance(part, PackedExperts)]


def test_experts_that_ranks_do_not_divide_are_whole_on_each():
    """48 intermediate numbers over five ranks; and an activation that nobody knows."""
    model = library_model("MixtralForCausalLM", torch.float32)
    before = [weight.shape for weight in model.parameters()]

    def divided(ranks):
        return divide_experts(model, ranks.target)

    assert on_ranks(5, 1, divided) == [{}] * 5
    for part in model.modules():
        if type(part).__name__ == "MixtralExperts":
            part.act_fn = nn.Tanh()
    assert on_ranks(2, 1, divided) == [{}] * 2
    assert [weight.shape for weight in model.parameters()] == before


def test_packed_experts_give_their_plain_weights_free():
    model = library_model("MixtralForCausalLM", torch.float32)
    before = sum(weight.numel() for weight in model.parameters())
    replace_experts(model, Packing(choose_kernels("auto", CPU, torch.float32)))
    of_experts = 3 * 5 * 3 * 32 * 48
    assert sum(weight.numel() for weight in model.parameters()) == before - of_experts
    assert packed_bytes(model) == [5 * 4 * (2 * 48 * 32 + 32 * 48)] * 3


def test_quantised_experts_compute_the_same_natively_as_by_the_reference():
    found = []
    for option in ("auto", REFERENCE):
        model = library_model("Qwen3MoeForCausalLM", torch.float32)
        kernels = choose_kernels(option, CPU, torch.float32)
        replace_experts(model, Packing(kernels, WeightFormat.INT8))
        found.append(logits(model))
    assert not torch.allclose(found[1], logits(library_model("Qwen3MoeForCausalLM", torch.float32)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-4 * float(found[1].abs().max()))


def test_experts_that_the_kernels_do_not_have_stay_and_are_named(caplog):
    model = library_model("MixtralForCausalLM", torch.float32)
    for part in model.modules():
        if type(part).__name__ == "MixtralExperts":
            part.act_fn = nn.Tanh()
    want_TV = logits(model)
    with caplog.at_level(logging.WARNING):
        replace_experts(model, Packing(choose_kernels("auto", CPU, torch.float32)))
    assert not any(isinstance(part, PackedExperts) for part in model.modules())
    assert "MixtralExperts stays the transformers library's own code: the kernels have no Tanh" in (
        caplog.text
    )
    assert torch.equal(logits(model), want_TV)
