"""Tiny models of the families that the transformers library computes, made by the library."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    ApertusConfig,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    HunYuanMoEV1Config,
    Llama4Config,
    Llama4TextConfig,
    LlamaConfig,
    LlavaConfig,
    MellumConfig,
    MiniCPM3Config,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from tests.models.checkpoints import TINY

_WINDOW: dict[str, Any] = {"sliding_window": 7}
_HEADS: dict[str, Any] = {"head_dim": 16}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_OLD: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _tiny(kind: type[PretrainedConfig], **changes: Any) -> Callable[[], PretrainedConfig]:
    return lambda: kind(**TINY | {"pad_token_id": 2} | changes)


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "apertus": _tiny(ApertusConfig),
    "cohere": _tiny(CohereConfig),
    "deepseek-v2": _tiny(DeepseekV2Config, **_LATENT, n_routed_experts=4),
    "deepseek-v3": _tiny(DeepseekV3Config, **_LATENT, n_routed_experts=8, n_group=2, topk_group=1),
    "ernie-4.5": _tiny(Ernie4_5Config, **_HEADS),
    "exaone-4": _tiny(Exaone4Config, **_WINDOW, num_hidden_layers=4, sliding_window_pattern=4),
    "falcon": lambda: FalconConfig(**_OLD, alibi=False, max_position_embeddings=96),
    "falcon-40b": lambda: FalconConfig(
        **_OLD,
        alibi=False,
        max_position_embeddings=96,
        new_decoder_architecture=True,
        num_kv_heads=2,
    ),
    "gemma": _tiny(GemmaConfig, **_HEADS),
    "gemma-2": _tiny(
        Gemma2Config, **_HEADS, **_WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=2.0
    ),
    "gemma-3": _tiny(Gemma3TextConfig, **_HEADS, **_WINDOW, query_pre_attn_scalar=16),
    "gemma-4": _tiny(
        Gemma4TextConfig,
        **_HEADS,
        **_WINDOW,
        num_hidden_layers=4,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=0,
        global_head_dim=24,
    ),
    "glm-4": _tiny(Glm4Config, **_HEADS),
    "glm-4-moe-lite": _tiny(Glm4MoeLiteConfig, **_LATENT, n_routed_experts=4),
    "glm-4-moe": _tiny(
        Glm4MoeConfig,
        **_HEADS,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        use_qk_norm=True,
    ),
    "gpt-2": lambda: GPT2Config(
        vocab_size=61,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=96,
        bos_token_id=0,
        eos_token_id=1,
    ),
    "gpt-neox": _tiny(GPTNeoXConfig),
    "gpt-oss": _tiny(
        GptOssConfig,
        **_HEADS,
        **_WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "granite": _tiny(
        GraniteConfig,
        logits_scaling=4.0,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
    ),
    "hunyuan-moe": _tiny(
        HunYuanMoEV1Config,
        head_dim=8,
        num_experts=4,
        moe_topk=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "llama": _tiny(LlamaConfig),
    "llama-4": _tiny(
        Llama4TextConfig,
        head_dim=8,
        num_hidden_layers=4,
        intermediate_size_mlp=48,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=16,
        floor_scale=8,
    ),
    "mellum": _tiny(
        MellumConfig,
        **_HEADS,
        **_WINDOW,
        **_EXPERTS,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        num_mtp_layers=1,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "mistral": _tiny(MistralConfig, **_WINDOW),
    "minicpm-3": _tiny(
        MiniCPM3Config,
        **{key: value for key, value in _LATENT.items() if key.endswith(("rank", "dim"))},
        num_key_value_heads=4,
    ),
    "mixtral": _tiny(MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    "nemotron": _tiny(NemotronConfig),
    "olmo-2": _tiny(Olmo2Config),
    "olmoe": _tiny(OlmoeConfig, num_experts=4, num_experts_per_tok=2),
    "opt": lambda: OPTConfig(
        **_OLD, ffn_dim=48, max_position_embeddings=96, word_embed_proj_dim=32, pad_token_id=2
    ),
    "phi-3": _tiny(Phi3Config),
    "phi-moe": _tiny(PhimoeConfig, **_WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "qwen-2": _tiny(Qwen2Config, **_WINDOW, use_sliding_window=True, max_window_layers=1),
    "qwen-2-moe": _tiny(Qwen2MoeConfig, **_EXPERTS, shared_expert_intermediate_size=40),
    "qwen-3": _tiny(Qwen3Config, **_HEADS),
    "qwen-3-moe": _tiny(Qwen3MoeConfig, **_HEADS, **_EXPERTS),
    "seed-oss": _tiny(SeedOssConfig, **_HEADS),
    "smollm-3": _tiny(SmolLM3Config, num_hidden_layers=4),
    "stablelm": _tiny(StableLmConfig),
    "starcoder-2": _tiny(Starcoder2Config, **_WINDOW),
}

_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_GEMMA_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_LLAMA4 = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
PICTURE = TINY["vocab_size"] - 1  # the token that stands for pictures


def _gemma3() -> PretrainedConfig:
    text = TINY | _WINDOW | {"layer_types": _GEMMA_TYPES}
    tower = _TOWER | {"model_type": "siglip_vision_model"}
    return Gemma3Config(text_config=text, vision_config=tower, image_token_index=PICTURE)


def _llama4() -> PretrainedConfig:
    text = TINY | _LLAMA4 | {"attention_chunk_size": 16, "pad_token_id": 2}
    sizes = "vision_output_dim", "projector_input_dim", "projector_output_dim"
    tower = _TOWER | {"intermediate_size": 64} | dict.fromkeys(sizes, 32)
    return Llama4Config(text_config=text, vision_config=tower)


def _llava() -> PretrainedConfig:
    text = TINY | _WINDOW | {"model_type": "mistral"}
    tower = _TOWER | {"model_type": "clip_vision_model"}
    return LlavaConfig(text_config=text, vision_config=tower, image_token_index=PICTURE)


def _mistral3() -> PretrainedConfig:
    text = TINY | _WINDOW | {"model_type": "mistral"}
    tower = _TOWER | {"model_type": "pixtral"}
    return Mistral3Config(text_config=text, vision_config=tower, image_token_index=PICTURE)


def _qwen2_5_vl() -> PretrainedConfig:
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
    text = TINY | {"rope_parameters": _ROPE}
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower | {"out_hidden_size": 32},
        image_token_id=PICTURE,
        video_token_id=PICTURE - 1,
        vision_start_token_id=PICTURE - 2,
        vision_end_token_id=PICTURE - 3,
    )


# Those that read pictures too.
PICTURES: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma-3-vl": _gemma3,
    "llama-4-vl": _llama4,
    "llava": _llava,
    "mistral-3-vl": _mistral3,
    "qwen-2.5-vl": _qwen2_5_vl,
}


def family_model(name: str, **changes: Any) -> PreTrainedModel:
    """A model of the family; its weights mean nothing. `changes`: of its config's attributes."""
    config = (CONFIGS | PICTURES)[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    kinds = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if name in PICTURES else MODEL_FOR_CAUSAL_LM_MAPPING
    )
    kind = kinds[type(config)]
    config.architectures = [kind.__name__]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config)


def randomised_family(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """As `family_model`, weights so large that every part of the network shows in the logits."""
    return randomise(family_model(name, **changes), seed)


def randomise(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Give the model such weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
            elif key.endswith("bias") or "sinks" in key:
                weight.copy_(noise * 0.3)
            else:
                weight.add_(noise * 0.3)
        model.get_input_embeddings().weight.mul_(4.0)
    return model.eval()
