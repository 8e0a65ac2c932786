"""How a model's makers want it to be sampled: generation_config.json."""

from pathlib import Path
from typing import Any

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError, RequestError
from outdraft.core.sampling import SamplingParams
from outdraft.models.checkpoints.config_json import read_json

FILE = "generation_config.json"
# Their names for our parameters; what else the file holds is about other ways to generate.
FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_sampling(config: EngineConfig, model_path: Path) -> dict[str, Any]:
    """Parameters of a request that leaves them open, by their names in SamplingParams.

    Args:
        model_path: directory of the model's checkpoint.

    Raises:
        ConfigError: the file that was asked for is missing, or a value is out of its range.
    """
    if config.generation_config == "vllm":
        return {}
    is_own = config.generation_config == "auto"
    path = (model_path if is_own else Path(config.generation_config).expanduser()) / FILE
    if not path.is_file():
        if is_own:
            return {}
        raise ConfigError(
            f"generation_config must be auto, vllm or a directory with {FILE}, got "
            f"{config.generation_config!r}"
        )
    values = read_json(path)
    found = {ours: values[name] for name, ours in FIELDS.items() if values.get(name) is not None}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ConfigError(f"{path}: {error}; generation_config='vllm' ignores it") from None
    return found
