"""Tiny random EAGLE checkpoints in each published layout, with what the reference reads."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.ops import Kernels
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.config import ModelConfig
from tests.reference.eagle import Settings

VOCABULARY, DRAFT_VOCABULARY, TARGET_SIZE, TARGET_LAYERS = 61, 17, 32, 6
EPS = 1e-5
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": TARGET_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": EPS,
    "rope_theta": 500.0,
}
TAPS = {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}


def random_target(
    kernels: Kernels,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    **changes: Any,
) -> CausalLM:
    """A target whose embedding and head a drafter may read."""
    raw = LAYER | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": TARGET_LAYERS}
    target = CausalLM(ModelConfig.from_mapping(raw | changes), kernels, dtype, device)
    generator = torch.Generator().manual_seed(7)
    for slot in target.checkpoint_slots().values():
        slot.to.copy_(torch.randn(slot.shape, generator=generator).bfloat16())
    target.pack()
    return target


def save_random_target(path: Path, **changes: Any) -> Path:
    """A checkpoint of `random_target`, in a new folder."""
    path.mkdir(exist_ok=True)
    raw = LAYER | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": TARGET_LAYERS}
    (path / "config.json").write_text(json.dumps(raw | changes))
    kernels = choose_kernels("reference", torch.device("cpu"), torch.float64)
    target = random_target(kernels, **changes)
    tensors = {name: slot.to.clone() for name, slot in target.checkpoint_slots().items()}
    save_file(tensors, path / "model.safetensors")
    return path


@dataclass(frozen=True)
class Layout:
    """One kind of checkpoint.

    Attributes:
        config: config.json.
        size: hidden size of the drafter.
        parts: names of what it has beside the layers and fc, as in EAGLE's repository.
        rename: what this layout calls a tensor.
    """

    config: dict[str, Any]
    rename: Callable[[str], str] = str
    is_newer: bool = True
    size: int = TARGET_SIZE
    head_size: int = TARGET_SIZE // 4
    num_layers: int = 1
    parts: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    mask_shape: tuple[int, ...] = ()
    num_drafts: int = VOCABULARY
    taps: tuple[int, ...] = (2, 3, 3)
    settings: dict[str, bool] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Random weights that bfloat16 holds, as float64, by the names of EAGLE's repository."""
        generator = torch.Generator().manual_seed(3)
        tensors: dict[str, Tensor] = {}
        for name, shape in self._shapes().items():
            noise = torch.randn(shape, generator=generator)
            if name.endswith("norm.weight") or name.startswith("fc_norm"):
                noise = 1 + 0.3 * noise
            elif name == "embed_tokens.weight":
                noise = 2 * noise
            elif len(shape) == 2 and name != "mask_hidden":
                noise = noise * shape[1] ** -0.5
            tensors[name] = noise.bfloat16().double()
        if "d2t" in self.parts:
            chosen = torch.randperm(VOCABULARY, generator=generator)[: self.num_drafts]
            ids = chosen.sort().values
            tensors["d2t"] = ids - torch.arange(self.num_drafts)
            tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool)
            tensors["t2d"][ids] = True
        return tensors

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        size, inner = self.size, LAYER["intermediate_size"]
        kv_size = 2 * self.head_size
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (size, 3 * TARGET_SIZE if self.is_newer else 2 * size)
        }
        for index in range(self.num_layers):
            width = 2 * size if self.is_newer and index == 0 else size
            name = f"layers.{index}"
            shapes |= {
                f"{name}.self_attn.q_proj.weight": (4 * self.head_size, width),
                f"{name}.self_attn.k_proj.weight": (kv_size, width),
                f"{name}.self_attn.v_proj.weight": (kv_size, width),
                f"{name}.self_attn.o_proj.weight": (size, 4 * self.head_size),
                f"{name}.mlp.gate_proj.weight": (inner, size),
                f"{name}.mlp.up_proj.weight": (inner, size),
                f"{name}.mlp.down_proj.weight": (size, inner),
                f"{name}.post_attention_layernorm.weight": (size,),
            }
            if self.is_newer or index > 0:
                shapes[f"{name}.input_layernorm.weight"] = (size,)
        if self.is_newer:
            shapes |= {"layers.0.hidden_norm.weight": (size,), "norm.weight": (size,)}
        for bias in self.biases:
            shapes[f"{bias}.bias"] = shapes[f"{bias}.weight"][:1]
        return shapes | self._part_shapes()

    def _part_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (VOCABULARY, self.size),
            "lm_head.weight": (self.num_drafts, self.size),
            "input_norm.weight": (3 * TARGET_SIZE,),
            "mask_hidden": self.mask_shape,
            **{f"fc_norm.{tap}.weight": (TARGET_SIZE,) for tap in range(3)},
            **{f"layers.0.self_attn.{x}_norm.weight": (self.head_size,) for x in "qk"},
        }
        return {name: shapes.get(name, (self.size,)) for name in self.parts if name != "d2t"}

    def reference(self, target: CausalLM) -> tuple[dict[str, Tensor], Settings]:
        """What tests/reference/eagle.py reads; what is left out is the target's."""
        own = {"embed_tokens.weight": target.embed_tokens.source}
        assert target.lm_head.weight is not None
        own["lm_head.weight"] = target.lm_head.weight
        weights = {name: weight.detach().cpu().double() for name, weight in own.items()}
        settings = Settings(4, 2, self.head_size, LAYER["rope_theta"], EPS, VOCABULARY)
        return weights | self.tensors(), replace(settings, **self.settings)

    def save(self, path: Path) -> Path:
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config))
        tensors = {self.rename(name): tensor for name, tensor in self.tensors().items()}
        save_file(tensors, path / "model.safetensors")
        return path


def _midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def _inside_model(name: str) -> str:
    return name if name.startswith("lm_head") else f"model.{name}"


def _speculators(name: str) -> str:
    name = name.replace("layers.0.", "transformer.")
    return name.replace("fc.", "fusion_fc.") if name.startswith("fc.") else name


_ADDED_NORMS = (
    "embedding_layernorm.weight",
    "layers.0.input_layernorm.weight",
    "pre_lm_head_layernorm.weight",
)
_TTT_NAMES = dict(
    zip(
        _ADDED_NORMS,
        ("embed_layernorm.weight", "hidden_layernorm.weight", "lm_head_layernorm.weight"),
        strict=True,
    )
)
_OWN = ("embed_tokens.weight", "lm_head.weight")
_REDUCED = ("d2t", "lm_head.weight")
_FC_NORMS = tuple(f"fc_norm.{tap}.weight" for tap in range(3))
_QKV = tuple(f"layers.0.self_attn.{x}_proj" for x in "qkv")


def _first(**changes: Any) -> dict[str, Any]:
    return LAYER | {"architectures": ["LlamaForCausalLMEagle"]} | changes


def _third(**changes: Any) -> dict[str, Any]:
    return LAYER | {"architectures": ["LlamaForCausalLMEagle3"]} | changes


def _library(kind: str, layer: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """A config of the speculators library."""
    return {
        "speculators_model_type": kind,
        "architectures": [f"{kind.title()}Speculator"],
        "transformer_layer_config": LAYER | (layer or {}),
        **options,
    }


_NEWER_OPTIONS: dict[str, Any] = {
    "draft_vocab_size": VOCABULARY,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}

LAYOUTS: dict[str, Layout] = {
    "eagle": Layout(
        _first(architectures=["LlamaForCausalLM"], bias=True),
        is_newer=False,
        parts=("embed_tokens.weight",),
        biases=("fc",),
        taps=(),
    ),
    "eagle-two-layers": Layout(
        _first(num_hidden_layers=2), _inside_model, is_newer=False, num_layers=2, taps=()
    ),
    "eagle-vllm": Layout(
        {
            "architectures": ["EAGLEModel"],
            "model_type": "eagle",
            "model": LAYER | {"architectures": ["LlamaForCausalLM"]},
            "eagle_fc_bias": True,
            "truncated_vocab_size": VOCABULARY,
        },
        _inside_model,
        is_newer=False,
        parts=_OWN,
        biases=("fc",),
        taps=(),
    ),
    "eagle-qkv-bias": Layout(
        _first(mask_token_id=60),
        is_newer=False,
        biases=_QKV,
        parts=("mask_hidden",),
        mask_shape=(1, TARGET_SIZE),
        taps=(),
    ),
    "eagle-speculators": Layout(
        _library("eagle", layernorms=True, fusion_bias=True),
        _speculators,
        is_newer=False,
        parts=_ADDED_NORMS,
        biases=("fc",),
        taps=(),
    ),
    "eagle-added-norms": Layout(
        _first(),
        lambda name: _TTT_NAMES.get(name, name),
        is_newer=False,
        parts=_ADDED_NORMS,
        taps=(),
    ),
    "eagle3": Layout(
        _third(architectures=["LlamaForCausalLM"], draft_vocab_size=DRAFT_VOCABULARY),
        _midlayer,
        parts=_REDUCED,
        num_drafts=DRAFT_VOCABULARY,
    ),
    "eagle3-nothing-own": Layout(_third(eagle_config=TAPS), _midlayer, taps=(1, 4, 6)),
    "eagle3-specforge": Layout(
        _third(
            eagle_config=TAPS | {"use_aux_hidden_state": True},
            draft_vocab_size=DRAFT_VOCABULARY,
            target_hidden_size=TARGET_SIZE,
            hidden_size=24,
        ),
        _midlayer,
        size=24,
        head_size=6,
        parts=(*_OWN, "d2t"),
        num_drafts=DRAFT_VOCABULARY,
        taps=(1, 4, 6),
    ),
    "eagle3.1": Layout(
        _third(fc_norm=True, norm_output=True, draft_vocab_size=DRAFT_VOCABULARY),
        _midlayer,
        parts=(*_REDUCED, *_FC_NORMS),
        num_drafts=DRAFT_VOCABULARY,
        settings={"norm_output": True},
    ),
    "eagle3-fc-norm": Layout(_third(fc_norm=True), _inside_model, parts=_FC_NORMS),
    "eagle3-norm-output": Layout(
        _third(norm_output=True), _midlayer, settings={"norm_output": True}
    ),
    "eagle3-nested-norm-before-fc": Layout(
        _third(eagle_config=TAPS | {"norm_before_fc": True}),
        parts=("input_norm.weight", "lm_head.weight"),
        taps=(1, 4, 6),
    ),
    "eagle3-speculators": Layout(
        _library(
            "eagle3",
            **_NEWER_OPTIONS
            | TAPS
            | {
                "norm_before_residual": True,
                "norm_before_fc": True,
                "draft_vocab_size": DRAFT_VOCABULARY,
            },
        ),
        parts=(*_OWN, "d2t", "input_norm.weight"),
        num_drafts=DRAFT_VOCABULARY,
        taps=(1, 4, 6),
        settings={"norm_before_residual": True},
    ),
    "eagle3-speculators-qwen3": Layout(
        _library("eagle3", {"model_type": "qwen3", "head_dim": 10}, **_NEWER_OPTIONS),
        head_size=10,
        parts=(*_OWN, *(f"layers.0.self_attn.{x}_norm.weight" for x in "qk")),
    ),
    "p-eagle": Layout(
        _third(
            architectures=["PEagleDraftModel"],
            num_hidden_layers=3,
            attention_bias=False,
            draft_vocab_size=VOCABULARY,
            pard_token=60,
        ),
        num_layers=3,
        parts=(*_OWN, "mask_hidden", "d2t"),
        mask_shape=(1, 3 * TARGET_SIZE),
    ),
    "p-eagle-speculators": Layout(
        _library("peagle", {"num_hidden_layers": 2}, mask_token_id=60, **_NEWER_OPTIONS),
        num_layers=2,
        parts=(*_OWN, "mask_hidden"),
        mask_shape=(1, 1, 3 * TARGET_SIZE),
    ),
    "p-eagle-narrow-mask": Layout(
        _third(dflash_config={"mask_token_id": 60}),
        parts=("mask_hidden",),
        mask_shape=(1, TARGET_SIZE),
    ),
}
