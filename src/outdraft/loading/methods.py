"""Loads networks that draft, and builds the proposers that use them."""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outdraft.config.engine import EngineConfig, SchedulerConfig
from outdraft.config.speculation import (
    BLOCK_SOURCES,
    HEAD_SOURCES,
    DraftNetworkConfig,
    NgramConfig,
    SourceConfig,
    SuffixConfig,
)
from outdraft.core.draft import HEAD_WINDOW, MAX_DRAFTS, STATE_WINDOW, DraftSource
from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import ALONE, RankGroup
from outdraft.drafting.device.asks import StateWindow
from outdraft.drafting.device.block_drafter import BlockDrafter, num_spare_blocks
from outdraft.drafting.device.head_drafter import HeadDrafter
from outdraft.drafting.device.network_drafter import DraftNetwork, NetworkDrafter, mask_token_id
from outdraft.drafting.device.proposer import DeviceDrafter, DeviceProposer
from outdraft.drafting.device.self_drafter import (
    SPARSE_WINDOW,
    AttendedBlocks,
    BlockBudget,
    SelfDrafter,
    attention_layers,
)
from outdraft.drafting.device.translated_model import DraftModel, TranslatedModel, VocabularyMap
from outdraft.drafting.host_sources import HostProposer
from outdraft.drafting.proposers import NgramProposer, SuffixProposer
from outdraft.kernels.ops import Kernels
from outdraft.kv.cache import KVCache
from outdraft.models.base import LanguageModel, StateNetwork
from outdraft.models.checkpoints.files import resolve_model_path
from outdraft.models.choose import load_language_model
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.drafters.dflash import DFlashNetwork, load_dflash
from outdraft.models.drafters.eagle import EagleNetwork, load_eagle, load_mtp
from outdraft.models.drafters.medusa import MedusaHeads, load_medusa
from outdraft.models.drafters.mlp_speculator import MLPSpeculator, load_mlp_speculator
from outdraft.models.drafters.tables import TargetTables
from outdraft.models.shape import ModelShape
from outdraft.text.tokenizer import load_tokenizer
from outdraft.text.vocabulary import Vocabulary, map_vocabularies

_logger = logging.getLogger(__name__)

Network = DraftModel | StateNetwork | MedusaHeads | MLPSpeculator | DFlashNetwork


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A network that drafts.

    Attributes:
        layers: the shapes of its layers on this rank, which keep keys and values; None: it has
            none.
        feature_size: numbers of the target's pass that it keeps for each token of its window.
        num_taps: residual streams of the target that these are made of.
        max_drafts: most tokens ahead of the text.
        mask_token_id: of a network trained for parallel drafting.
        block_rows: of a network that drafts blocks; 0: it does not.
        shares_cache: it is the target, or a copy of it, and drafts in the target's cache.
        max_context: most tokens of a text that it attends to; None: all.
    """

    network: Network
    layers: ModelShape | None
    feature_size: int = 0
    num_taps: int = 0
    max_drafts: int = MAX_DRAFTS
    mask_token_id: int | None = None
    block_rows: int = 0
    shares_cache: bool = False
    max_context: int | None = None

    @property
    def state_window(self) -> int:
        """Tokens of each text whose states of the target it keeps."""
        if self.layers is None:
            return HEAD_WINDOW
        if self.shares_cache:
            return 0 if self.max_context is None else SPARSE_WINDOW
        return STATE_WINDOW if self.feature_size else 0

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes that it keeps in a block of the pool."""
        if self.layers is None or self.shares_cache:
            return 0
        return cache_bytes(self.layers, block_size, self.network.dtype)

    def spare_blocks(self, block_size: int) -> int:
        """Blocks of each running request beside those of the pool."""
        return num_spare_blocks(self.block_rows, block_size) if self.block_rows else 0


def cache_bytes(layers: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of a block's keys and values."""
    return KVCache.bytes_per_block(layers.cache_shapes, block_size, dtype)


def load_drafter(
    config: EngineConfig, target_path: Path, target: LanguageModel, group: RankGroup = ALONE
) -> LoadedDrafter | None:
    """Load the network that drafts, in the target's dtype and on its device; None: no network does.

    Args:
        group: the ranks that it is spread over.

    Raises:
        ConfigError: it is missing, unknown or damaged, cannot be divided over its ranks, or it does
            not fit the target.
    """
    network = config.speculation.network
    if network is None:
        return None
    if network.source is DraftSource.SELF:
        return _load_self(config, network, target_path, target)
    path = resolve_model_path(network.model) if network.model else target_path
    with naming(path):
        return _load_network(network, path, target_path, target, group)


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Name the checkpoint in errors of the block, as there may be several.

    Raises:
        ConfigError: as the block did, and the message names the path.
    """
    try:
        yield
    except ConfigError as error:
        if str(path) in str(error):
            raise
        raise ConfigError(f"{path}: {error}") from error


def _load_network(
    config: DraftNetworkConfig,
    path: Path,
    target_path: Path,
    target: LanguageModel,
    group: RankGroup,
) -> LoadedDrafter:
    source, kept = config.source, WeightFormat(config.quantization) if config.quantization else None
    tables = TargetTables(target, group, target_path)
    if source is DraftSource.MTP:
        return _of_layers(load_mtp(path, tables, kept))
    if source in (DraftSource.EAGLE, DraftSource.EAGLE3):
        eagle = load_eagle(path, tables, kept)
        _check_kind(path, eagle.config.version, source)
        mask = eagle.config.mask_token_id if eagle.has_mask_state else None
        return _of_layers(eagle, mask_token_id=mask)
    if source in BLOCK_SOURCES:
        blocks = load_dflash(path, tables, kept)
        shape = blocks.config
        _check_kind(path, shape.kind, source)
        return _of_layers(blocks, max_drafts=shape.num_drafts, block_rows=shape.block_size)
    if source in HEAD_SOURCES:
        load = load_medusa if source is DraftSource.MEDUSA else load_mlp_speculator
        heads = load(path, tables, kept)
        return LoadedDrafter(heads, None, max_drafts=heads.num_heads)
    place = path, target.dtype, target.device, target.kernels
    model = load_language_model(*place, quantization=kept, group=group, drafts=True)
    vocabulary = check_vocabularies(target_path, target, path, model, config.min_vocabulary_overlap)
    mask = mask_token_id(path, model.config.vocab_size) if config.parallel_drafting else None
    if vocabulary is None:
        return LoadedDrafter(model, model.shard, mask_token_id=mask)
    if mask is not None:
        raise ConfigError(
            f"parallel_drafting needs a drafter of the target's vocabulary, but {path} has "
            "another one: its mask token has no id there"
        )
    translated = TranslatedModel(model, vocabulary)
    return LoadedDrafter(translated, translated.shard)


def _of_layers(network: StateNetwork | DFlashNetwork, **others: Any) -> LoadedDrafter:
    taps = len(network.taps)
    return LoadedDrafter(network, network.shard, network.feature_size, taps, **others)


def _check_kind(path: Path, kind: str, source: DraftSource) -> None:
    if kind != source:
        raise ConfigError(f"{path} holds {kind}, but the method is {source}")


def check_vocabularies(
    target_path: Path,
    target: LanguageModel,
    drafter_path: Path,
    drafter: LanguageModel,
    least_overlap: float,
) -> VocabularyMap | None:
    """Map the drafter's ids to the target's; None: they mean the same.

    If one of them has no tokenizer, only the sizes are compared, with a warning.

    Raises:
        ConfigError: the sizes differ and a tokenizer is missing, or less than `least_overlap` of
            the target's vocabulary is shared.
    """
    sizes = target.config.vocab_size, drafter.config.vocab_size
    texts = load_tokenizer(target_path), load_tokenizer(drafter_path)
    if texts[0] is not None and texts[1] is not None:
        if sizes[0] == sizes[1] and texts[0].get_vocab() == texts[1].get_vocab():
            return None
        vocabulary = map_vocabularies(
            Vocabulary.of(target_path, texts[0], target.config),
            Vocabulary.of(drafter_path, texts[1], drafter.config),
        )
        if vocabulary.num_shared == 0 or vocabulary.target_share < least_overlap:
            raise ConfigError(
                f"the draft model {drafter_path} shares {vocabulary}, less than "
                f"min_vocabulary_overlap={least_overlap:g}: choose a drafter whose tokenizer is "
                "more like the target's, or lower it"
            )
        _logger.info("the draft model %s shares %s", drafter_path, vocabulary)
        return vocabulary
    without = target_path if texts[0] is None else drafter_path
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the draft model {drafter_path} has another vocabulary ({sizes[1]:,} ids) than the "
            f"target {target_path} ({sizes[0]:,} ids), and {without} has no tokenizer.json that "
            "would show which tokens they share: choose a drafter with the same tokenizer"
        )
    _logger.warning(
        "%s has no tokenizer.json: of the vocabularies of target and draft model only the "
        "sizes were compared (%d ids). If the ids of %s mean other tokens, hardly any draft "
        "will be accepted.",
        without,
        sizes[0],
        drafter_path,
    )
    return None


def device_proposer(
    config: EngineConfig, drafter: LoadedDrafter, target: LanguageModel, target_cache: KVCache
) -> DeviceProposer:
    """Build the proposer that drafts with the network, in its part of the pool's blocks.

    Raises:
        ConfigError: the network cannot draft as the configuration asks.
    """
    network, loaded = config.speculation.network, drafter.network
    assert network is not None, "a drafter without a configuration"
    most, kernels = config.scheduler.max_num_seqs, target.kernels
    drafting: DeviceDrafter
    if isinstance(loaded, MedusaHeads | MLPSpeculator):
        drafting = HeadDrafter(loaded, most, kernels)
    elif drafter.shares_cache:
        assert not isinstance(loaded, DFlashNetwork | TranslatedModel | StateNetwork)
        attended = None
        if network.kv_budget is not None:
            assert isinstance(target, CausalLM), "_load_self refuses others"
            budget = BlockBudget.of_tokens(network.kv_budget, target_cache.block_size)
            attended = AttendedBlocks(target, target_cache, budget, most)
        max_rows = config.scheduler.max_num_batched_tokens
        drafting = SelfDrafter(loaded, target_cache, max_rows, attended)
    else:
        drafting = _layered_drafter(network, drafter, loaded, target_cache, config.scheduler)
    return DeviceProposer(kernels, drafting, network.tree, samples=network.samples)


def _layered_drafter(
    config: DraftNetworkConfig,
    drafter: LoadedDrafter,
    loaded: DraftModel | StateNetwork | DFlashNetwork,
    pool: KVCache,
    scheduler: SchedulerConfig,
) -> NetworkDrafter | BlockDrafter:
    """Build the drafter of a network with its own layers, which reads its drafts or mask tokens.

    Args:
        pool: the target's cache: the drafter's has as many blocks.
    """
    layers, mask, size = drafter.layers, drafter.mask_token_id, drafter.feature_size
    num_seqs, max_rows = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    dtype, device = loaded.dtype, loaded.device
    assert layers is not None
    window, mask_state_D = None, None
    if size:
        window = StateWindow(num_seqs, size, dtype, device, drafter.state_window)
        if isinstance(loaded, EagleNetwork) and config.parallel_drafting and mask is not None:
            mask_state_D = loaded.mask_state()
    # After the blocks of the pool come those that it does not manage.
    num_blocks = pool.num_blocks + num_seqs * drafter.spare_blocks(pool.block_size)
    cache = KVCache(layers.cache_shapes, num_blocks, pool.block_size, dtype, device)
    if isinstance(loaded, DFlashNetwork):
        assert window is not None
        return BlockDrafter(loaded, cache, max_rows, config.source, window)
    place = DraftNetwork(loaded), cache, max_rows, config.source
    if not config.parallel_drafting:
        return NetworkDrafter(*place, window)
    if mask is None:
        raise ConfigError(
            f"{config.model!r} was not trained for parallel_drafting: it names no mask token"
        )
    return NetworkDrafter(*place, window, mask_token_id=mask, mask_state_D=mask_state_D)


def host_proposers(sources: Sequence[SourceConfig], kernels: Kernels) -> list[HostProposer]:
    """Make the proposers of the sources that draft on the host."""
    return [
        NgramProposer(one, kernels)
        if isinstance(one, NgramConfig)
        else SuffixProposer(one, kernels)
        for one in sources
        if isinstance(one, NgramConfig | SuffixConfig)
    ]


def _load_self(
    config: EngineConfig, network: DraftNetworkConfig, path: Path, target: LanguageModel
) -> LoadedDrafter:
    """Take the target as drafter, or load its weights again with the configured quantization.

    Args:
        path: of the target.

    Raises:
        ConfigError: a budget is asked for, but the target's layers have windows, or the
            transformers library computes it.
    """
    num_taps, model = 0, target
    if network.kv_budget is not None:
        name = f"{target.config.architecture} of {path}"
        if not isinstance(target, CausalLM):
            raise ConfigError(
                f"kv_budget needs a model that outdraft computes itself, but the transformers "
                f"library computes {name}: leave kv_budget out, and give a quantization"
            )
        if any(window is not None for window in target.config.windows):
            raise ConfigError(
                f"kv_budget needs layers that attend to the whole text, but {name} has some with a "
                "window: leave kv_budget out, and give a quantization"
            )
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
