"""GGUF files of families that the transformers library computes, against its own reading of them.

The oracle has the configuration that the file was written from, and the numbers that the library
makes of the file.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    NemotronConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.models.base import LanguageModel
from outdraft.models.checkpoints.config_json import read_config
from outdraft.models.choose import checkpoint_dtype, load_language_model
from outdraft.models.modules import linears_of
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import TINY, chunked_logits, llama, randomised
from tests.models.quantized.gguf_files import SIZES, write_gguf
from tests.rounding import model_bound

NUM_TOKENS = 40
_SIZES: dict[str, Any] = TINY | SIZES | {"pad_token_id": 2}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
_EXPERT_KEYS = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 256,
}
_ALL_KINDS = {"num_hidden_layers": 7}  # of layers: every sixth of Gemma 3 has no window
_GEMMA: dict[str, Any] = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 16}
_CAPS: dict[str, Any] = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
_LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
_LONG, _SHORT = [1.0 + i / 8 for i in range(32)], [1.0 + i / 32 for i in range(32)]
_SCALED = {
    "rope_type": "longrope",
    "long_factor": _LONG,
    "short_factor": _SHORT,
    "attention_factor": 1.25,
    "original_max_position_embeddings": 32,
}


def longrope(max_len: int) -> PretrainedConfig:
    """A configuration for texts of up to `max_len` tokens."""
    sizes = {"max_position_embeddings": max_len, "original_max_position_embeddings": 32}
    return Phi3Config(**_SIZES | sizes, rope_parameters=_SCALED)


# The configuration, and the keys that the converter writes for it beside the usual ones.
FAMILIES: dict[str, tuple[Callable[[], PretrainedConfig], dict[str, Any]]] = {
    "gemma2": (
        lambda: Gemma2Config(**_SIZES | _GEMMA | _CAPS),
        {"attention.sliding_window": 16, **_CAPS},
    ),
    "gemma3": (
        lambda: Gemma3TextConfig(**_SIZES | _GEMMA | _ALL_KINDS),
        {"attention.sliding_window": 16},
    ),
    "gemma3-scaled": (
        lambda: Gemma3TextConfig(
            **_SIZES | _GEMMA | _ALL_KINDS,
            rope_parameters={"full_attention": _LINEAR, "sliding_attention": _LOCAL},
        ),
        {
            "attention.sliding_window": 16,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
        },
    ),
    "gemma3-no-window": (
        lambda: Gemma3TextConfig(**_SIZES | _GEMMA, layer_types=["full_attention"] * 2),
        {},
    ),
    "nemotron": (lambda: NemotronConfig(**_SIZES), {"attention.layer_norm_epsilon": 1e-5}),
    "phi3": (
        lambda: Phi3Config(**_SIZES | {"sliding_window": 16}),
        {"attention.sliding_window": 16},
    ),
    "phi3-long": (
        lambda: longrope(64),
        {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25},
    ),
    "qwen2moe": (
        lambda: Qwen2MoeConfig(**_SIZES | _EXPERTS | {"shared_expert_intermediate_size": 512}),
        _EXPERT_KEYS | {"expert_shared_feed_forward_length": 512},
    ),
    "qwen3moe": (
        lambda: Qwen3MoeConfig(**_SIZES | _EXPERTS | {"head_dim": 64, "norm_topk_prob": True}),
        _EXPERT_KEYS,
    ),
    "stablelm": (lambda: StableLmConfig(**_SIZES), {"attention.layer_norm_epsilon": 1e-5}),
    "starcoder2": (lambda: Starcoder2Config(**_SIZES), {"attention.layer_norm_epsilon": 1e-5}),
}


def made(config: PretrainedConfig) -> PreTrainedModel:
    return randomised(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config))


def written(family: str, path: Path, kind: Kind, **more: Any) -> PretrainedConfig:
    make, keys = FAMILIES[family]
    factors = {"rope_factors_long": _LONG, "rope_factors_short": _SHORT}
    write_gguf(
        made(make()),
        path,
        lambda name: kind,
        more=keys | more,
        **factors if family == "phi3-long" else {},
    )
    return make()


def logits_of_library(path: Path, config: PretrainedConfig, token_ids_T: torch.Tensor) -> Any:
    """Those of the network with the numbers that the library reads."""
    model = made(config)
    numbers = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(numbers, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        return model(token_ids_T[None]).logits[0]


def assert_same_logits(path: Path, config: PretrainedConfig) -> LanguageModel:
    model = load_language_model(path, torch.float32, "cpu", cpu_kernels())
    generator = torch.Generator().manual_seed(0)
    token_ids_T = torch.randint(3, config.vocab_size, (NUM_TOKENS,), generator=generator)
    wanted = logits_of_library(path, config, token_ids_T)
    with torch.no_grad():
        got = chunked_logits(model, token_ids_T, [25, 1, 14]).float()
    formats = {linear.format for linear in linears_of(model)}
    tolerance = 4 * model_bound(formats) * max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_numbers_give_the_librarys_logits(family: str, tmp_path: Path):
    config = written(family, tmp_path / "m.gguf", Kind.F32)
    model = assert_same_logits(tmp_path / "m.gguf", config)
    assert checkpoint_dtype(tmp_path / "m.gguf") == "float32"
    assert model.config.tie_word_embeddings == config.tie_word_embeddings


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gemma2", "phi3", "qwen2moe", "qwen3moe"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K])
def test_codes_stay_codes_and_give_the_librarys_logits(family: str, kind: Kind, tmp_path: Path):
    config = written(family, tmp_path / "m.gguf", kind)
    model = assert_same_logits(tmp_path / "m.gguf", config)
    formats = {linear.format for linear in linears_of(model)}
    plain = {WeightFormat.FLOAT32} if family == "qwen2moe" else set()  # whether experts are shared
    assert formats == {WeightFormat(kind.name.lower())} | plain


def test_the_frequencies_of_short_texts_are_those_of_the_file(tmp_path: Path):
    path = tmp_path / "m.gguf"
    written("phi3-long", path, Kind.F32)
    token_ids_T = torch.arange(3, 33)
    wanted = logits_of_library(path, longrope(64), token_ids_T)
    model = load_language_model(path, torch.float32, "cpu", cpu_kernels(), max_model_len=32)
    with torch.no_grad():
        got = chunked_logits(model, token_ids_T, [30])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_families_with_a_network_here_need_no_other_library(tmp_path: Path):
    """Start-up time: transformers alone takes seconds."""
    write_gguf(randomised(llama(**SIZES)), tmp_path / "m.gguf", lambda name: Kind.Q8_0)
    script = f"""
import sys
from pathlib import Path
import torch
from outdraft.kernels.choose import AUTO, choose_kernels
from outdraft.models.choose import load_language_model
path = Path({str(tmp_path / "m.gguf")!r})
kernels = choose_kernels(AUTO, torch.device("cpu"), torch.float32)
load_language_model(path, torch.float32, "cpu", kernels)
print(sorted({{"gguf", "transformers"}} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_native_family_may_run_through_the_library_too(tmp_path: Path):
    path = write_gguf(randomised(llama(**SIZES)), tmp_path / "m.gguf", lambda name: Kind.Q8_0)
    token_ids_T = torch.arange(3, 33)
    options = {"dtype": torch.float32, "device": "cpu", "kernels": cpu_kernels()}
    own = load_language_model(path, **options)
    other = load_language_model(path, **options, implementation="transformers")
    with torch.no_grad():
        wanted, got = (chunked_logits(one, token_ids_T, [30]) for one in (own, other))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-2)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_keys_of_the_architecture_that_nothing_reads_are_refused_by_name(
    family: str, tmp_path: Path
):
    path, key = tmp_path / "m.gguf", "attention.twisted"
    if family == "llama":
        model = randomised(llama(**SIZES))
        write_gguf(model, path, lambda name: Kind.F16, more={key: 2, "rope.unheard_of": 1.0})
    else:
        written(family, path, Kind.F16, **{key: 2, "rope.unheard_of": 1.0})
    names = rf"{family}\.attention\.twisted, {family}\.rope\.unheard_of"
    with pytest.raises(ConfigError, match=f"metadata that this engine does not read: {names}"):
        read_config(path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"attention.value_length": 16}, "attention.value_length that is not attention.key_length"),
        ({"rope.dimension_count": 16}, "rope.dimension_count of a part of each head"),
        ({"rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor 1.5 is not supported"),
        ({"attention.head_count_kv": [1, 2] * 3 + [1]}, "head_count_kv that differs from layer to"),
    ],
)
def test_values_that_the_network_would_not_get_are_refused(
    more: dict[str, Any], message: str, tmp_path: Path
):
    written("gemma3", tmp_path / "m.gguf", Kind.F16, **more)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path / "m.gguf")


def test_tensors_that_the_network_lacks_are_refused_by_name(tmp_path: Path):
    path = tmp_path / "m.gguf"
    written("gemma3", path, Kind.F16)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.3.ffn_norm.weight", b"blk.3.ffn_more.weight"))
    with pytest.raises(ConfigError, match=r"no use for: blk\.3\.ffn_more\.weight"):
        load_language_model(path, torch.float32, "cpu", cpu_kernels())


def test_an_architecture_that_the_library_does_not_map_is_refused(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "unheard-of")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"'unheard-of' is not supported; supported in .*gemma3"):
        read_config(tmp_path / "m.gguf")
