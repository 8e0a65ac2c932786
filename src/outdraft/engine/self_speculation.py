"""What drafts where the target drafts for itself."""

from pathlib import Path

from outdraft.config.engine import EngineConfig
from outdraft.config.speculation import DraftNetworkConfig
from outdraft.core.errors import ConfigError
from outdraft.core.weight_format import WeightFormat
from outdraft.drafting.device.attended_blocks import attention_layers
from outdraft.engine.drafters import LoadedDrafter
from outdraft.models.base import LanguageModel
from outdraft.models.choose import load_language_model
from outdraft.models.decoder.causal_lm import CausalLM


def load_self(
    config: EngineConfig, network: DraftNetworkConfig, path: Path, target: LanguageModel
) -> LoadedDrafter:
    """The target, or its weights once more in the bits that the network's configuration names.

    Args:
        path: of the target.

    Raises:
        ConfigError: a budget is asked for, but the target's layers have windows, or the
            transformers library computes it.
    """
    num_taps, model = 0, target
    if network.kv_budget is not None:
        _check_layers(target, path)
        num_taps = len(attention_layers(target.config.num_layers))
    if network.quantization is not None:
        model = load_language_model(
            path,
            target.dtype,
            target.device,
            target.kernels,
            implementation=config.model_impl,
            max_model_len=config.max_model_len,
            quantization=WeightFormat(network.quantization),
            drafts=True,
            has_random_weights=config.load_format == "dummy",
        )
    return LoadedDrafter(
        model, model.shard, num_taps=num_taps, shares_cache=True, max_context=network.kv_budget
    )


def _check_layers(target: LanguageModel, path: Path) -> None:
    """Only whose queries are known, and which attend to the whole text."""
    name = f"{target.config.architecture} of {path}"
    if not isinstance(target, CausalLM):
        raise ConfigError(
            f"kv_budget needs a model that outdraft computes itself, but the transformers library "
            f"computes {name}: leave kv_budget out, and give a quantization"
        )
    if any(window is not None for window in target.config.windows):
        raise ConfigError(
            f"kv_budget needs layers that attend to the whole text, but {name} has some with a "
            "window: leave kv_budget out, and give a quantization"
        )
