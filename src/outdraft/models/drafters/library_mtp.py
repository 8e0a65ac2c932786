"""Layers for multi-token prediction of families that the transformers library computes.

The library has a module for such a layer (its `MtpLayer`): two norms, a product that makes one
state of the token before the state, a decoder layer of the target's family, and a norm. The state
after that norm is for the head and for the next drafted token, as in the library. Attention and
products are this engine's, as in the target. The embedding and the head are the target's: copies
of them in the checkpoint are not read.

Dimension key: T rows, R rows that need logits, Q of them on this rank, D hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_layers import MtpLayer, MtpModel

from outdraft.attention.base import AttentionForm, AttentionMetadata, LayerCache
from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.models.checkpoints.files import tensor_places, weight_files
from outdraft.models.decoder.layers import product_of
from outdraft.models.drafters.tables import TargetedNetwork, TargetTables
from outdraft.models.library.checkpoint import Packing, matches
from outdraft.models.library.experts import replace_experts
from outdraft.models.library.loader import (
    LOADING,
    causal_class,
    mtp_patterns,
    quiet_library,
    read_config,
)
from outdraft.models.library.model import TransformersModel
from outdraft.models.library.operations import (
    NAME,
    Survey,
    computed_by,
    leaves_threads,
    one_torch_thread,
    paged,
    register,
)
from outdraft.models.library.products import fuse_layers, pack_products
from outdraft.models.library.survey import FAILURES, add_windows
from outdraft.models.modules import memory_bytes
from outdraft.models.shape import DRAFT_RANKS, ModelShape


class LibraryMtp(TargetedNetwork):
    """A `StateNetwork` that drafts from the target's states after its final norm.

    Attributes:
        taps: none.
        feature_size: D.
        shard: its one layer.
    """

    fused = None

    taps = ()

    def __init__(
        self,
        layer: MtpLayer,
        rotary: Callable[..., Any],
        attention: tuple[nn.Module, AttentionForm],
        tables: TargetTables,
        shard: ModelShape,
    ) -> None:
        """
        Args:
            layer: its products are packed.
            rotary: makes the rotary embedding of positions, as the target's does.
            attention: the module that attends, and its form.
        """
        super().__init__(tables)
        self.layer, self.shard, self.feature_size = layer, shard, shard.hidden_size
        self._rotary = rotary
        self._leaves_threads = leaves_threads(self.kernels, layer)
        self._attention = attention
        self._head, self._embedding = product_of(tables.head), tables.embedding

    def features(self, hidden_TD: Tensor, tapped_TKS: Tensor) -> Tensor:
        """[T, D]: the target's states as they are."""
        return hidden_TD

    def forward(
        self,
        token_ids_T: Tensor,
        states_TF: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        [cache] = caches
        module, form = self._attention
        embedded_TD = self._embedding(token_ids_T)
        attention = paged(self.kernels.attention, {module: (cache, form)}, metadata)
        with one_torch_thread(self._leaves_threads), computed_by(attention):
            return _run(self.layer, self._rotary, embedded_TD, states_TF, metadata.positions_T)

    def logits(self, states_RD: Tensor, shares: RequestShares = ALL_HERE) -> Tensor:
        """[Q, V] of float32; of float64 for a float64 target."""
        return self.wide(shares.turn(self._head(states_RD), self.shard.vocab_size))

    @property
    def weight_bytes(self) -> int:
        """Weights that one step of a draft reads at most, the target's head included."""
        return memory_bytes(self) + memory_bytes(self.tables.head)


def load_library_mtp(
    path: Path, tables: TargetTables, quantization: WeightFormat | None
) -> LibraryMtp:
    """The first such layer of the target's checkpoint, ready to run, its weights packed.

    Raises:
        ConfigError: the library knows no such layers of the family, a tensor is missing or unknown,
            or the drafter is to be spread over ranks.
    """
    config, target = read_config(path), tables.target
    assert isinstance(target, TransformersModel)
    if tables.group.size > 1:
        raise ConfigError(
            f"{DRAFT_RANKS} must be 1 for the MTP layers of {target.config.architecture}: every "
            "rank has whole ones"
        )
    register()
    kind = causal_class(config, path)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"the MTP layers of {path} are quantised: those of {target.config.architecture} are "
            "read unquantised only"
        )
    names, wanted = tensor_places(weight_files(path)), mtp_patterns(config, kind)
    if not any(matches(name, wanted) for name in names):
        raise ConfigError(
            f"config.json of {path} names num_nextn_predict_layers, but it has no tensors of such "
            f"layers: {', '.join(wanted)}"
        )
    with LOADING:
        found = _loaded(kind, config, path, target.dtype)
    layer, mtp_config = cast("MtpLayer", found.layers[0]), found.config
    nn.Module.to(layer, target.device).eval().requires_grad_(False)
    rotary = _rotary_of(target.rotary, found)
    survey = _surveyed(layer, rotary, target)
    add_windows(survey, mtp_config, {kind, *map(type, survey.forms)})
    [attention], [cache] = survey.forms.items(), survey.caches
    holder = nn.ModuleDict({"layer": layer})
    packing = Packing(target.kernels, quantization)
    replace_experts(holder, packing)
    fuse_layers(holder, packing)
    pack_products(holder, packing)
    shard = replace(
        target.config,
        num_layers=1,
        num_heads=survey.num_heads,
        num_kv_heads=cache.num_kv_heads,
        head_size=max(cache.key_size, cache.value_size),
        layers=(cache,),
        depends_on_context=False,
    )
    return LibraryMtp(layer, rotary, attention, tables, shard)


def _loaded(kind: Any, config: PretrainedConfig, path: Path, dtype: torch.dtype) -> MtpModel:
    """The library's model of all such layers. Its tables have no numbers."""
    config.dtype = dtype
    config.name_or_path = str(path)
    try:
        with quiet_library():  # what is missing is an error
            with torch.device("meta"):
                shell: Any = kind._from_config(config, dtype=dtype, attn_implementation=NAME)
            # The library lists the numbers of such layers in the published checkpoints only.
            shell._keys_to_ignore_on_load_unexpected = mtp_patterns(config, kind)
            found = MtpModel.from_pretrained(shell)
            found.set_experts_implementation("eager")
    except (OSError, ValueError, RuntimeError, AttributeError, StopIteration) as error:
        raise ConfigError(
            f"transformers cannot load the MTP layers of {path} ({kind.__name__}): {error}"
        ) from error
    return found


def _surveyed(layer: MtpLayer, rotary: Callable[..., Any], target: TransformersModel) -> Survey:
    """The attention of the layer, found by a pass over two rows."""
    survey, size = Survey(), target.config.hidden_size
    rows_2D = torch.ones(2, size, dtype=target.dtype, device=target.device)
    try:
        with torch.inference_mode(), computed_by(survey):
            _run(layer, rotary, rows_2D, rows_2D, torch.arange(2, device=target.device))
    except FAILURES as error:
        raise ConfigError(
            f"the MTP layer of {target.config.architecture} cannot run on this engine: {error}"
        ) from error
    if len(survey.forms) != 1:
        raise ConfigError(
            f"the MTP layer of {target.config.architecture} attends {len(survey.forms)} times, not "
            "once"
        )
    return survey


def _run(
    layer: MtpLayer,
    rotary: Callable[..., Any],
    embedded_TD: Tensor,
    states_TD: Tensor,
    positions_T: Tensor,
) -> Tensor:
    """[T, D]: after the layer's last norm."""
    embedded_1TD, positions_1T = embedded_TD[None], positions_T[None]
    return layer(
        embedded_1TD,
        states_TD[None],
        position_embeddings=rotary(embedded_1TD, position_ids=positions_1T),
        attention_mask=None,
        position_ids=positions_1T,
        past_key_values=None,
    )[0]


def _rotary_of(rotary: nn.Module | None, model: MtpModel) -> Callable[..., Any]:
    """The rotary embedding for the first layer of the model."""
    if rotary is None:
        return _no_rotary
    if not model.has_per_layer_rope:
        return rotary.forward
    return partial(rotary.forward, layer_type=model.config.layer_types[0])


def _no_rotary(embedded_1TD: Tensor, position_ids: Tensor) -> None:
    """The rotary embedding of a family that has no rotary positions."""
