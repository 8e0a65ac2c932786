"""From a checkpoint of any family that the transformers library has to a model that can run.

Only safetensors are read, and no code of a checkpoint is run. What cannot be computed exactly is
refused by name: networks with recurrent state, encoders, attention that the library keeps to
itself.

The library lets two kinds of rotary embedding change with the longest text of a batch. Keys in the
cache would then not fit those of later rows, and a text would depend on the others. Here they
follow from the longest text that the engine reads, as those of the other models do.
"""

import copy
import logging
import re
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers import logging as library_logging
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import ALONE, RankGroup
from outdraft.kernels.ops import Kernels
from outdraft.models.checkpoints.config_json import read_config as read_raw_config
from outdraft.models.checkpoints.config_json import read_generation_config, read_token_ids
from outdraft.models.checkpoints.files import listed, tensor_places, weight_files
from outdraft.models.checkpoints.gguf_file import is_gguf
from outdraft.models.checkpoints.quantization import check_unquantised, read_quantization
from outdraft.models.checkpoints.reader import Checkpoint, read_checkpoint
from outdraft.models.checkpoints.slots import check_quantization
from outdraft.models.library.checkpoint import (
    Packing,
    log_summary,
    matches,
    presented,
    read_rest,
    replace_deferred,
    unread,
)
from outdraft.models.library.experts import replace_experts
from outdraft.models.library.gguf import library_config, open_gguf_checkpoint
from outdraft.models.library.model import TransformersModel
from outdraft.models.library.operations import NAME, Survey, catch_operations, register
from outdraft.models.library.products import fuse_layers, keeps_codes, pack_products
from outdraft.models.library.ranks import check_division, divide, divide_experts
from outdraft.models.library.survey import (
    check_packed,
    leave_out_beside_the_text,
    survey_attention,
    text_part,
)
from outdraft.models.shape import DRAFT_RANKS, TARGET_RANKS, ModelShape

_logger = logging.getLogger(__name__)
LOADING = Lock()  # meanwhile the library changes torch's default dtype, for all threads

# Layers whose keys and values are all that they keep of a text.
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_ATTENTION_TABLE = "ALL_ATTENTION_FUNCTIONS"
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_MOVING = ("dynamic", "longrope")
# Dtypes that have no meaning without scales.
_CODES = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I32", "I8", "U8"}
_FIXED = "fixed"  # no kind of the library: nothing is updated


def load_transformers_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    max_model_len: int | None = None,
    quantization: WeightFormat | None = None,
    group: RankGroup = ALONE,
    *,
    drafts: bool = False,
    has_random_weights: bool = False,
) -> TransformersModel:
    """Load a checkpoint of any family that the library has; raises as load_language_model.

    Args:
        group: each of its ranks reads its part of what they divide; what is quantised it reads
            whole, one weight after the other, and keeps its part.
    """
    config = read_config(path)
    kind = causal_class(config, path)
    check_division(config, group.size, DRAFT_RANKS if drafts else TARGET_RANKS)
    kinds = kind, MODEL_MAPPING.get(type(config.get_text_config()), kind)
    takes_attention = any(hasattr(sys.modules[one.__module__], _ATTENTION_TABLE) for one in kinds)
    name = NAME if takes_attention else "sdpa"
    register()
    has_tiles = torch.device(device).type == "cpu"
    checkpoint = Checkpoint({})
    with LOADING:
        if has_random_weights:
            model = _random(kind, path, config, dtype, name)
        else:
            checkpoint, is_cut = _opened(kind, path, config), group.size > 1
            source: dict[str, Any] = {"pretrained_model_name_or_path": path}
            if is_cut or is_gguf(path) or checkpoint.has_codes:
                tensors = presented(checkpoint, dtype, keeps_codes=has_tiles, is_cut=is_cut)
                source = {"pretrained_model_name_or_path": None, "state_dict": tensors}
            model = _loaded(kind, source, config, dtype, name)
    model = text_part(model)
    if left_out := leave_out_beside_the_text(model):
        _logger.info("%s: texts do not meet %s: left out", path, ", ".join(left_out))
    spreads, sums = divide(model, group), divide_experts(model, group)
    kept, dequantised = replace_deferred(model, keeps_codes if has_tiles else lambda *_: False)
    check_quantization(quantization, kept)
    nn.Module.to(model, device).eval().requires_grad_(False)
    model.set_experts_implementation("eager")  # the others do not know all dtypes
    context_len = _context_len(config)
    moves = fix_frequencies(model, min(max_model_len or context_len, context_len))
    mask = None if takes_attention else _caught_attention(model, kernels, dtype)
    survey = survey_attention(model, config, mask)
    shape = _shape(path, config, survey, moves)
    packing = Packing(kernels, quantization, checkpoint.release)
    replace_experts(model, packing, sums)
    fuse_layers(model, packing, group)
    pack_products(model, packing, spreads)
    rest = read_rest(model)
    kept = [one for one in kept if one not in rest]
    log_summary(checkpoint, kept, dequantised, has_tiles=has_tiles)
    if group.size == 1:
        check_packed(model, mask)
    return TransformersModel(model, shape, survey.forms, kernels, group, mask)


def unread_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a checkpoint directory, its weights not read: `deferred` says which they are.

    Raises:
        ConfigError: as load_transformers_model, as far as tensors are concerned.
    """
    config = read_config(path)
    kind = causal_class(config, path)
    tensors = unread(_opened(kind, path, config), dtype)
    source = {"pretrained_model_name_or_path": None, "state_dict": tensors}
    with LOADING:
        model = _loaded(kind, source, config, dtype, "sdpa")
    leave_out_beside_the_text(model)
    return model


def read_config(path: Path) -> PretrainedConfig:
    """The library's configuration for a checkpoint's config.json, or for a GGUF file.

    Raises:
        ConfigError: it does not know the model.
    """
    try:
        if is_gguf(path):
            return library_config(path)
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        file = path if is_gguf(path) else path / "config.json"
        raise ConfigError(f"transformers cannot read {file}: {error}") from error


def causal_class(config: PretrainedConfig, path: Path) -> Any:
    """The library's class for the architecture that config.json names. One that reads pictures
    too reads texts here."""
    names, text_config = config.architectures or [], config.get_text_config()
    kinds = MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    found: list[Any] = [mapping[type(config)] for mapping in kinds if type(config) in mapping]
    kind: Any = next((one for one in found if [one.__name__] == names), found[0] if found else None)
    if kind is None or len(names) != 1 or kind.__name__ != names[0]:
        known = f"; for {config.model_type} it has {kind.__name__}" if kind is not None else ""
        raise ConfigError(
            f"{path} holds {' and '.join(names) or 'no named architecture'}, which transformers "
            f"does not have as a model that only continues texts{known}"
        )
    types = set(getattr(text_config, "layer_types", None) or ()) - _LAYER_TYPES
    if kind._is_stateful or types:
        what = f" ({', '.join(sorted(types))} layers)" if types else ""
        raise ConfigError(
            f"{names[0]} keeps a recurrent or compressed state of the text{what}: it cannot be "
            "taken back when a draft is refused, so this engine does not run it"
        )
    if getattr(text_config, "alibi", False):
        raise ConfigError(f"{names[0]} with alibi adds to the scores of its attention")
    if getattr(text_config, "use_bidirectional_attention", False):
        raise ConfigError(f"{names[0]} with use_bidirectional_attention looks ahead in the text")
    return kind


def _caught_attention(model: PreTrainedModel, kernels: Kernels, dtype: torch.dtype) -> Tensor:
    """Catch attention that asks no table of the library; a mask to give to the model, which then
    makes none."""
    for module in model.modules():
        if hasattr(module, "layer_idx") and "Attention" in type(module).__name__:
            catch_operations(module, kernels)
    return torch.zeros((1, 1, 1, 1), dtype=dtype, device=model.device)


def _loaded(
    kind: Any,
    source: Mapping[str, Any],
    config: PretrainedConfig,
    dtype: torch.dtype,
    attention: str,
) -> PreTrainedModel:
    """Load by from_pretrained; `source`: its arguments that say where the weights are."""
    drafting = mtp_patterns(config, kind)
    try:
        with quiet_library():  # what is missing is an error below
            model, report = kind.from_pretrained(
                **source,
                config=_plain(config),
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                attn_implementation=attention,
            )
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"transformers cannot load this {kind.__name__}: {error}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(map(str, report[what]))
        if what == "unexpected_keys":
            keys = [key for key in keys if not matches(key, drafting)]
        if keys:
            raise ConfigError(f"the checkpoint has {what.replace('_', ' ')}: {listed(keys)}")
    return model


@contextmanager
def quiet_library() -> Generator[None]:
    """Inside, the library logs errors only, and shows no progress."""
    level = library_logging.get_verbosity()
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(level)
        library_logging.enable_progress_bar()


def _opened(kind: Any, path: Path, config: PretrainedConfig) -> Checkpoint:
    """The tensors of a checkpoint; none of a weight is read."""
    if is_gguf(path):
        return open_gguf_checkpoint(path, _empty(kind, config))
    quantization = read_quantization(read_raw_config(path))
    if quantization is None:
        return read_checkpoint(None, tensor_places(weight_files(path)), ())
    left_out = mtp_patterns(config, kind)
    places = tensor_places(
        weight_files(path), lambda name: None if matches(name, left_out) else name
    )
    found = read_checkpoint(quantization, places, _empty(kind, config).state_dict())
    for name, weight in sorted(found.weights.items()):
        if weight.is_plain and weight.dtype in _CODES:
            raise ConfigError(
                f"tensor {name!r} has dtype {weight.dtype}, and its quantization_config "
                "does not say what it stands for"
            )
    return found


def _plain(config: PretrainedConfig) -> PretrainedConfig:
    """A copy without its quantisation, so that the library takes the weights for plain ones."""
    plain: Any = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def _empty(kind: Any, config: PretrainedConfig) -> PreTrainedModel:
    """The network, with weights that take no memory."""
    with torch.device("meta"):
        return kind(_plain(config))


def mtp_patterns(config: PretrainedConfig, kind: Any) -> list[str]:
    """Patterns for the names of tensors of layers for multi-token prediction.

    The library lists those of the published checkpoints with the names that it does not read. Some
    of them are numbers of layers, which mean other layers in a checkpoint of another size.
    """
    text = config.get_text_config()
    count, first = getattr(text, "num_mtp_layers", None) or 0, text.num_hidden_layers
    parts = [rf"^model\.layers\.{index}\." for index in range(first, first + count)]
    if count:
        listed = kind._keys_to_ignore_on_load_unexpected or ()
        parts += [pattern for pattern in listed if not re.search(r"\d", pattern)]
    return parts


def _random(
    kind: Any, path: Path, config: PretrainedConfig, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """A model with small random numbers, the same ones every time."""
    check_unquantised(path, read_quantization(read_raw_config(path)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind._from_config(config, dtype=dtype, attn_implementation=attention)


def _context_len(config: PretrainedConfig) -> int:
    text_config = config.get_text_config()
    for name in _LENGTHS:
        value = getattr(text_config, name, None)
        if type(value) is int and value > 0:
            return value
    raise ConfigError(f"config.json tells no longest text: {' or '.join(_LENGTHS)}")


def _shape(path: Path, config: PretrainedConfig, survey: Survey, moves: bool) -> ModelShape:
    text, raw, caches = config.get_text_config(), read_raw_config(path), survey.caches
    generation = read_generation_config(path)

    def ids_of(name: str) -> tuple[int, ...]:
        # The part for texts leaves out what is its family's default.
        of_part = text.to_dict() if text is not config else {}
        return read_token_ids(raw, name) or read_token_ids(of_part, name)

    return ModelShape(
        architecture=(config.architectures or [""])[0],
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=_intermediate_size(text),
        num_layers=len(caches),
        num_heads=survey.num_heads,
        num_kv_heads=max(one.num_kv_heads for one in caches),
        head_size=max(max(one.key_size, one.value_size) for one in caches),
        max_model_len=_context_len(config),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        bos_token_id=next(iter(ids_of("bos_token_id")), None),
        eos_token_ids=read_token_ids(generation, "eos_token_id") or ids_of("eos_token_id"),
        torch_dtype=raw.get("dtype") or raw.get("torch_dtype"),
        layers=tuple(caches),
        depends_on_context=moves,
    )


def _intermediate_size(config: PretrainedConfig) -> int:
    """The width that one row computes: of the dense block, or of its experts side by side."""
    names = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "intermediate_size_mlp")
    sizes = [value for name in names if type(value := getattr(config, name, None)) is int]
    expert: Any = getattr(config, "moe_intermediate_size", None)
    per_row: Any = getattr(config, "num_experts_per_tok", None)
    if type(expert) is int and type(per_row) is int:
        sizes.append(expert * per_row)
    elif sizes and type(per_row) is int:
        sizes.append(max(sizes) * per_row)
    return max(sizes, default=4 * config.hidden_size)


def fix_frequencies(model: nn.Module, context_len: int) -> bool:
    """Fix frequencies that change with the text, for texts of up to context_len tokens; return True
    if there are such."""
    found = False
    for module in model.modules():
        rope_type: Any = getattr(module, "rope_type", None)
        kinds = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        for layer_type, kind in kinds.items():
            if kind not in _MOVING:
                continue
            options = {} if layer_type is None else {"layer_type": layer_type}
            prefix = "" if layer_type is None else f"{layer_type}_"
            own: Any = getattr(module, f"{prefix}inv_freq")
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
                module.config, own.device, seq_len=context_len, **options
            )
            own.copy_(frequencies)
            setattr(module, f"{prefix}attention_scaling", scaling)
            kinds[layer_type], found = _FIXED, True
        if not isinstance(rope_type, dict) and kinds[None] is _FIXED:
            module.rope_type = _FIXED  # pyright: ignore[reportArgumentType]
    return found
