"""The sampling parameters that a model's makers recommend: generation_config.json."""

from pathlib import Path
from typing import Any

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError, RequestError
from outdraft.core.sampling import SamplingParams
from outdraft.models.checkpoints.config_json import read_json

SAMPLING_FILE = "generation_config.json"


# The file's fields that are read, all but one by the names of our parameters.
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def default_sampling(config: EngineConfig, model_path: Path) -> dict[str, Any]:
    """Parameters of a request that leaves them open, by their names in SamplingParams.

    Args:
        model_path: directory of the model's checkpoint.

    Raises:
        ConfigError: the configured file is missing, or a value is out of its range.
    """
    if config.generation_config == "vllm":
        return {}
    is_own = config.generation_config == "auto"
    path = (model_path if is_own else Path(config.generation_config).expanduser()) / SAMPLING_FILE
    if not path.is_file():
        if is_own:
            return {}
        raise ConfigError(
            f"generation_config must be auto, vllm or a directory with {SAMPLING_FILE}, got "
            f"{config.generation_config!r}"
        )
    values = read_json(path)
    found = {name: values[name] for name in _FIELDS if values.get(name) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ConfigError(f"{path}: {error}; generation_config='vllm' ignores it") from None
    return found
