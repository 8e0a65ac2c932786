"""The tensors of a GGUF file for a network of the transformers library.

The library's tables say what they are called there. It reads all of a file at once, as numbers, and
leaves out what it does not know; here tensors stay unread, codes stay codes, and a tensor that the
network has no use for is an error.

Dimension key: X experts, D inputs, E outputs.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.config_json import read_config
from outdraft.models.checkpoints.files import listed
from outdraft.models.checkpoints.gguf_file import GgufTensor, open_gguf
from outdraft.models.checkpoints.gguf_metadata import (
    ARCHITECTURE,
    EMBEDDING,
    HEAD,
    has_own_network,
    values_of_model,
)
from outdraft.models.checkpoints.gguf_weights import gguf_weights, stored_tensor
from outdraft.models.checkpoints.reader import Checkpoint
from outdraft.models.checkpoints.stored import StoredWeight
from outdraft.models.library.gguf_config import LONG, SHORT

_EXPERTS = re.compile(r"(blk\.\d+\.ffn_(gate|up|down)_exps)\.weight")
_IN_MODEL = re.compile(r"(.*\.experts)\.(?:gate_up_proj|down_proj)")
# Names that a family's checkpoints have for the products of one expert, in place of the usual ones.
_PARTS = {"minimax_m2": {"gate": "w1", "up": "w3", "down": "w2"}}


def library_config(path: Path) -> PretrainedConfig:
    """The library's configuration for the network of a GGUF file; raises as read_config."""
    raw = read_config(path)
    plain = {key: value for key, value in raw.items() if key != "quantization_config"}
    return CONFIG_MAPPING[raw["model_type"]].from_dict(plain)


def open_gguf_checkpoint(path: Path, model: PreTrainedModel) -> Checkpoint:
    """The tensors of a GGUF file; none of them is read.

    Args:
        model: the network, whose weights need no memory.

    Raises:
        ConfigError: the file is damaged, or does not fit the network.
    """
    if has_own_network(path):
        found = gguf_weights(path)
    else:
        found = _mapped_weights(path, model)
        _check_rotary_size(path, model)
    return Checkpoint({}, found, release=open_gguf(path).release)


def _mapped_weights(path: Path, model: PreTrainedModel) -> dict[str, StoredWeight]:
    """The weights of a file by the names of a checkpoint of the library."""
    file, config = open_gguf(path), read_config(path)
    kind = TENSOR_PROCESSORS.get(file.values[ARCHITECTURE], TensorProcessor)
    processor = kind(config=config)
    names: dict[str, str] = get_gguf_hf_weights_map(model, processor)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    parts = _PARTS.get(config["model_type"], {})
    found: dict[str, StoredWeight] = {}
    unknown = list[str]()
    for tensor in file.tensors.values():
        experts = _EXPERTS.fullmatch(tensor.name)
        name = names.get(experts[1] if experts else tensor.name)
        if tensor.name in (LONG, SHORT):  # the configuration has them
            continue
        if name is None:
            unknown.append(tensor.name)
        elif experts is not None:
            found |= _experts(tensor, name, parts.get(experts[2], f"{experts[2]}_proj"))
        else:
            found[name] = _weight(tensor, processor, shapes[name])
    if unknown:
        raise ConfigError(
            f"{path} has tensors that {type(model).__name__} has no use for: {listed(unknown)}"
        )
    return found


def _experts(tensor: GgufTensor, name: str, part: str) -> Iterator[tuple[str, StoredWeight]]:
    """The experts of one tensor [X, E, D], one by one.

    Args:
        name: of the network's parameter that holds all of them.
        part: what one's product is called.
    """
    match = _IN_MODEL.fullmatch(name)
    if match is None or len(tensor.shape) != 3:
        raise ConfigError(f"GGUF: experts that are {name} in the network are not supported")
    num_experts, num_rows, num_inputs = tensor.shape
    raw = tensor.raw.reshape(num_experts, num_rows, -1)
    for expert in range(num_experts):
        one = replace(tensor, shape=(num_rows, num_inputs), raw=raw[expert])
        yield f"{match[1]}.{expert}.{part}.weight", stored_tensor(one, None)


def _weight(tensor: GgufTensor, processor: TensorProcessor, shape: tuple[int, ...]) -> StoredWeight:
    """A tensor as it is, or with numbers that the library makes of it.

    Args:
        shape: that of the network's parameter.
    """
    stored = stored_tensor(tensor, None)
    if tensor.name in (EMBEDDING, HEAD) or not _is_changed(tensor, processor):
        return stored
    return StoredWeight(
        shape=shape,
        label=stored.label,
        group_inputs=shape[-1],
        reason="the network has other numbers than the file",
        is_plain=stored.is_plain,
        read=partial(_changed, stored, tensor.name, processor),
    )


def _is_changed(tensor: GgufTensor, processor: TensorProcessor) -> bool:
    """Is true if the library gives back something else than it gets. Takes no memory."""
    zeros = np.broadcast_to(np.float32(0), tensor.shape)
    return processor.process(zeros, tensor.name).weights is not zeros


def _changed(stored: StoredWeight, name: str, processor: TensorProcessor) -> Tensor:
    numbers: np.ndarray = processor.process(stored.numbers().float().numpy(), name).weights
    return torch.from_numpy(np.ascontiguousarray(numbers))


def _check_rotary_size(path: Path, model: PreTrainedModel) -> None:
    """Raise ConfigError if the network rotates more or less of each head than the file says."""
    of_model: Mapping[str, Any] = values_of_model(open_gguf(path))
    expected = of_model.get("rope.dimension_count", of_model.get("attention.key_length"))
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and expected not in (None, 2 * len(buffer)):
            raise ConfigError(
                f"{path}: {type(model).__name__} turns {2 * len(buffer)} numbers of each head, but "
                f"the file says {expected}"
            )
