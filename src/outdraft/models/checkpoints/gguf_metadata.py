"""The metadata of a GGUF file: the configuration, and the kinds of its tokens.

Names of keys are those of the GGUF specification (ggml-org/ggml, docs/gguf.md). Which tokens end
an output follows llama.cpp's rules by text (src/llama-vocab.cpp): many files mark no more than one
end, and some have their marks as plain text. Needs no torch.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.gguf_file import GgufFile, open_gguf

EMBEDDING, HEAD, FREQUENCIES = "token_embd.weight", "output.weight", "rope_freqs.weight"
ARCHITECTURE = "general.architecture"
# Architectures by the names of llama.cpp and config.json's model_type, of families that have a
# network here; llama.cpp has Mistral under llama.
NETWORKS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Numbers of the network, as config.json calls them; ModelConfig checks them.
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
ATTENTION_FACTOR = "rope.scaling.attn_factor"
# Keys of scaled frequencies, with the values at which they change nothing.
_UNSCALED = {
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
ROPE_KEYS = {
    *("rope.freq_base", "rope.dimension_count", "rope.scale_linear", "rope.scaling.factor"),
    *("rope.scaling.type", "rope.scaling.original_context_length", ATTENTION_FACTOR, *_UNSCALED),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
}
# Keys that no network needs to read.
HARMLESS = {
    "vocab_size": "the table of vectors has as many rows",
    "rope.scaling.finetuned": "it says how the model was trained, not what it computes",
    "tensor_data_layout": "llama.cpp does not read it either",
}
# Plain numbers; the dtype of a file is that of its smallest plain matrices.
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


class TokenKind(IntEnum):
    """Kinds of tokens, as the specification numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _texts(listed: str) -> tuple[str, ...]:
    return tuple(listed.split())


# Texts that have a role in files that name no token for it, by the role's key.
_ROLES = {
    "eot": _texts(
        "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> "
        "[EOT] <\uff5cend▁of▁sentence\uff5c> <end_of_utterance>"
    ),
    "eom": ("<|eom_id|>",),
    "fim_pre": _texts(
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim▁begin\uff5c> <PRE> ▁<PRE> "
        "<|code_prefix|> <|prefix|>"
    ),
    "fim_suf": _texts(
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim▁hole\uff5c> <SUF> ▁<SUF> "
        "<|code_suffix|> <|suffix|>"
    ),
    "fim_mid": _texts(
        "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim▁end\uff5c> <MID> ▁<MID> "
        "<|code_middle|> <|middle|>"
    ),
    "fim_pad": _texts("<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
    "fim_rep": _texts("<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_OLDER_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ENDS = {
    *_texts("<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>"),
    *_texts("<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <eos> [e~["),
    *_texts("<end_of_utterance> <turn|> <|tool_response> <\uff5cend▁of▁sentence\uff5c>"),
}
# Where all of the first end an output, the second goes on with it, and has another kind.
_EXCEPTIONS = (
    ({"<|return|>", "<|call|>"}, "<|end|>", TokenKind.USER_DEFINED),
    ({"<|return|>", "<|calls|>"}, "<|end|>", TokenKind.USER_DEFINED),
    ({"<|call|>", "<|flush|>"}, "<|end|>", TokenKind.USER_DEFINED),
    ({"<|calls|>", "<|flush|>"}, "<|end|>", TokenKind.USER_DEFINED),
    ({"<|tool_response>"}, "</s>", TokenKind.NORMAL),
)
_SHOWN = {"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"}  # are a part of the text
_WITH_ROLE = _ENDS | _SHOWN | {text for texts in _ROLES.values() for text in texts}


def vocabulary_of(values: Mapping[str, Any]) -> tuple[list[str], np.ndarray, tuple[int, ...]]:
    """The tokens in a file's metadata, the kind of each, and the ids that end an output, first the
    one that the file names. There may be no tokens."""
    tokens = list[str](values.get("tokenizer.ggml.tokens") or ())
    kinds_V = np.full(len(tokens), TokenKind.NORMAL, dtype=np.int32)
    given = np.asarray(values.get("tokenizer.ggml.token_type", kinds_V), dtype=np.int32)
    if len(given) < len(tokens):
        raise ConfigError(f"GGUF: {len(given)} types for {len(tokens)} tokens")
    kinds_V[:] = given[: len(tokens)]
    ids = {token: number for number, token in enumerate(tokens) if token in _WITH_ROLE}
    roles: dict[str, int] = {}
    for role in ("eos", *_ROLES):
        named = named_token(values, role)
        if named is None and (texts := [one for one in _ROLES.get(role, ()) if one in ids]):
            named = ids[texts[0]]
            kinds_V[named] = TokenKind.CONTROL
        if named is not None:
            roles[role] = named
    ends = [roles[role] for role in _END_ROLES if role in roles]
    by_text = [ids[text] for text in sorted(_ENDS & ids.keys())]
    kinds_V[by_text] = TokenKind.CONTROL
    kinds_V[[ids[text] for text in _SHOWN & ids.keys()]] = TokenKind.USER_DEFINED
    ends = list(dict.fromkeys([*ends, *by_text]))
    texts_of_ends = {tokens[one] for one in ends}
    for together, exempt, kind in _EXCEPTIONS:
        if texts_of_ends >= {*together, exempt} and ids[exempt] in ends:
            ends.remove(ids[exempt])
            kinds_V[ids[exempt]] = kind
    return tokens, kinds_V, tuple(ends)


@lru_cache(maxsize=4)
def end_tokens(file: GgufFile) -> tuple[int, ...]:
    """The ends of a file's vocabulary, looked for once: a start asks often."""
    return vocabulary_of(file.values)[2]


def named_token(values: Mapping[str, Any], role: str) -> int | None:
    """The id that a file names for a role, such as eos; None: it names none that exists."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in (role, _OLDER_KEYS.get(role)) if name]
    num_tokens = len(values.get("tokenizer.ggml.tokens") or [])
    return next(
        (int(values[key]) for key in keys if key in values and 0 <= values[key] < num_tokens), None
    )


def has_own_network(path: Path) -> bool:
    """Is true if the architecture of a GGUF file has a network here; raises as open_gguf."""
    return open_gguf(path).values.get(ARCHITECTURE) in NETWORKS


def config_of_gguf(path: Path) -> dict[str, Any]:
    """The content of a config.json for the same model, of a family that has a network here.

    Raises:
        ConfigError: as open_gguf; or a value is not supported.
    """
    file = open_gguf(path)
    name, tensors, of_model = file.values[ARCHITECTURE], file.tensors, values_of_model(file)
    refuse_unread(file, of_model.keys() - {*_SIZES.values(), "attention.value_length", *ROPE_KEYS})
    rope, rotary_size = rope_of(of_model), of_model.get("rope.dimension_count")
    if rotary_size not in (None, of_model.get("attention.key_length", rotary_size)):
        raise ConfigError(f"GGUF: rope.dimension_count {rotary_size} of a part of each head")
    config: dict[str, Any] = {
        "architectures": [NETWORKS[name]],
        "model_type": name,
        **({} if rotary_size is None else {"head_dim": rotary_size}),
        **{ours: of_model[theirs] for ours, theirs in _SIZES.items() if theirs in of_model},
        **common_config(file),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "rope_parameters": rope,
    }
    if FREQUENCIES in tensors:  # what Llama 3.1 divides the frequencies by
        if "rope_type" in rope:
            raise ConfigError(f"{path}: rope.scaling beside {FREQUENCIES} is not supported")
        factors = numbers_of(file, FREQUENCIES)
        config["rope_parameters"] = rope | {
            "rope_type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "attention_factor": 1.0,
        }
    return config


def values_of_model(file: GgufFile) -> dict[str, Any]:
    """Metadata of the architecture, without its name before them."""
    prefix = f"{file.values[ARCHITECTURE]}."
    return {
        key.removeprefix(prefix): value
        for key, value in file.values.items()
        if key.startswith(prefix)
    }


def refuse_unread(file: GgufFile, keys: Iterable[str]) -> None:
    """Raise ConfigError if one of these keys, which nothing reads, could change the network."""
    if unread := sorted(set(keys) - HARMLESS.keys()):
        names = ", ".join(f"{file.values[ARCHITECTURE]}.{key}" for key in unread)
        raise ConfigError(f"{file.path} has metadata that this engine does not read: {names}")


def common_config(file: GgufFile) -> dict[str, Any]:
    """Settings that the files of all families have under the same keys.

    Raises:
        ConfigError: there is no table of vectors.
    """
    values, tensors = file.values, file.tensors
    if EMBEDDING not in tensors:
        raise ConfigError(f"{file.path} lacks the tensor {EMBEDDING}")
    kinds = {tensor.kind for tensor in tensors.values() if len(tensor.shape) == 2}
    plain = next((kind for kind in _DTYPES if kind in kinds), "BF16")
    is_plain = kinds <= _DTYPES.keys()
    config: dict[str, Any] = {
        "vocab_size": tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": HEAD not in tensors,
        "torch_dtype": _DTYPES[plain] if is_plain else "bfloat16",
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(end_tokens(file)),
    }
    return config if is_plain else config | {"quantization_config": {"quant_method": "gguf"}}


def numbers_of(file: GgufFile, name: str) -> list[float]:
    """All numbers of a tensor of F32."""
    tensor = file.tensors[name]
    if tensor.kind != "F32":
        raise ConfigError(f"{file.path}: tensor {name} is {tensor.kind}, not F32")
    return tensor.raw.view("<f4").ravel().tolist()


def tokenizer_config_of_gguf(path: Path) -> dict[str, Any]:
    """The content of a tokenizer_config.json for the same model; raises as open_gguf."""
    values = open_gguf(path).values
    tokens = values.get("tokenizer.ggml.tokens") or []
    found = {"chat_template": values.get("tokenizer.chat_template")}
    for ours, theirs in _SPECIAL.items():
        if (token := named_token(values, theirs)) is not None:
            found[ours] = tokens[token]
    return {key: value for key, value in found.items() if value is not None}


def rope_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary frequencies as llama.cpp's load_hparams reads them from `ROPE_KEYS`, in the form of
    config.json's rope_parameters: files of 2023 have a factor without a type.

    Args:
        values: metadata of the architecture.

    Raises:
        ConfigError: a value is not supported.
    """
    rope: dict[str, Any] = {"rope_theta": float(values.get("rope.freq_base", 10000.0))}
    if (scale := values.get(ATTENTION_FACTOR, 1.0)) != 1.0:
        raise ConfigError(f"GGUF: {ATTENTION_FACTOR} {scale} is not supported")
    factor = float(values.get("rope.scaling.factor") or values.get("rope.scale_linear") or 1.0)
    kind = values.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(f"GGUF: rope.scaling.type {kind!r} is not supported")
    if kind == "none" or factor == 1.0:
        return rope
    for key, default in _UNSCALED.items():
        if values.get(key, default) != default:
            raise ConfigError(f"GGUF: {key} {values[key]} is not supported")
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if length := values.get("rope.scaling.original_context_length"):
            rope["original_max_position_embeddings"] = int(length)
        for name in ("beta_fast", "beta_slow"):
            if (beta := values.get(f"rope.scaling.yarn_{name}")) is not None:
                rope[name] = float(beta)
    return rope
