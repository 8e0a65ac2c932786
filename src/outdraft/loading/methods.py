"""Loads networks that draft, and builds the proposers that use them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from outdraft.drafting.device.attended_blocks import AttendedBlocks, BlockBudget, attention_layers
from outdraft.drafting.device.block_drafter import BlockDrafter, num_spare_blocks
from outdraft.drafting.device.draft_network import DraftNetwork
from outdraft.drafting.device.head_drafter import MedusaDrafter, MLPSpeculatorDrafter
from outdraft.drafting.device.network_drafter import NetworkDrafter
from outdraft.drafting.device.parallel_drafting import ParallelDrafter, mask_token_id
from outdraft.drafting.device.proposer import DeviceDrafter, DeviceProposer
from outdraft.drafting.device.self_drafter import SPARSE_WINDOW, SelfDrafter
from outdraft.drafting.device.translated_model import DraftModel, TranslatedModel, VocabularyMap
from outdraft.drafting.host.ngram import NgramProposer
from outdraft.drafting.host.proposer import HostProposer
from outdraft.drafting.host.suffix import SuffixProposer
from outdraft.kernels.ops import Kernels
from outdraft.kv.cache import KVCache
from outdraft.loading.memory import MemoryPlan
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

    @property
    def reads_ahead(self) -> bool:
        """True if its state of a token depends on the next token."""
        return self.layers is not None and self.feature_size > 0

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
    config: DraftNetworkConfig,
    target_path: Path,
    target: LanguageModel,
    group: RankGroup = ALONE,
) -> LoadedDrafter:
    """Load the network that the configuration names, in the target's dtype and on its device.

    Args:
        group: the ranks that it is spread over.

    Raises:
        ConfigError: it is missing, unknown or damaged, cannot be divided over its ranks, or it does
            not fit the target.
    """
    kept = WeightFormat(config.quantization) if config.quantization else None
    tables = TargetTables(target, group, target_path)
    if config.source is DraftSource.MTP:
        mtp = load_mtp(target_path, tables, kept)
        return LoadedDrafter(mtp, mtp.shard, mtp.feature_size)
    path = resolve_model_path(config.model)
    if config.source in (DraftSource.EAGLE, DraftSource.EAGLE3):
        eagle = load_eagle(path, tables, kept)
        version = eagle.config.version
        if version != config.source:
            raise ConfigError(f"{path} holds {version}, but the method is {config.source}")
        mask = eagle.config.mask_token_id if eagle.has_mask_state else None
        layers, size = eagle.shard, eagle.feature_size
        return LoadedDrafter(eagle, layers, size, len(eagle.taps), mask_token_id=mask)
    if config.source in BLOCK_SOURCES:
        return _loaded_blocks(load_dflash(path, tables, kept), config)
    if config.source in HEAD_SOURCES:
        load = load_medusa if config.source is DraftSource.MEDUSA else load_mlp_speculator
        heads = load(path, tables, kept)
        return LoadedDrafter(heads, None, max_drafts=heads.num_heads)
    place = path, target.dtype, target.device, target.kernels
    model = load_language_model(*place, quantization=kept, group=group, drafts=True)
    vocabulary = check_vocabularies(target_path, target, path, model, config.min_vocabulary_overlap)
    mask = mask_token_id(path, model.config.vocab_size) if config.parallel_drafting else None
    if vocabulary is not None:
        if mask is not None:
            raise ConfigError(
                f"parallel_drafting needs a drafter of the target's vocabulary, but {path} has "
                "another one: its mask token has no id there"
            )
        translated = TranslatedModel(model, vocabulary)
        return LoadedDrafter(translated, translated.shard)
    return LoadedDrafter(model, model.shard, mask_token_id=mask)


def _loaded_blocks(network: DFlashNetwork, config: DraftNetworkConfig) -> LoadedDrafter:
    shape = network.config
    if shape.kind != config.source:
        raise ConfigError(f"{config.model} holds {shape.kind}, but the method is {config.source}")
    return LoadedDrafter(
        network,
        network.shard,
        network.feature_size,
        len(network.taps),
        max_drafts=shape.num_drafts,
        block_rows=shape.block_size,
    )


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
    config: EngineConfig,
    drafter: LoadedDrafter,
    kernels: Kernels,
    memory: MemoryPlan,
    target: LanguageModel,
    target_cache: KVCache,
) -> DeviceProposer:
    """Build the proposer that drafts with the network, in its part of the pool's blocks.

    Raises:
        ConfigError: the network cannot draft as the configuration asks.
    """
    network = config.speculation.network
    assert network is not None, "a drafter without a configuration"
    loaded, num_seqs = drafter.network, config.scheduler.max_num_seqs
    drafting: DeviceDrafter
    if isinstance(loaded, MedusaHeads):
        drafting = MedusaDrafter(loaded, num_seqs, kernels)
    elif isinstance(loaded, MLPSpeculator):
        drafting = MLPSpeculatorDrafter(loaded, num_seqs, kernels)
    elif drafter.shares_cache:
        drafting = _self_drafter(config, loaded, target, target_cache)
    else:
        drafting = _layered_drafter(network, drafter, memory, target.device, config.scheduler)
    return DeviceProposer(kernels, drafting, network.tree, samples=network.samples)


def _self_drafter(
    config: EngineConfig, model: Network, target: LanguageModel, cache: KVCache
) -> SelfDrafter:
    """Build the drafter of the target, or of a copy of it."""
    assert not isinstance(model, DFlashNetwork | MedusaHeads | MLPSpeculator)
    assert not isinstance(model, TranslatedModel | StateNetwork)
    assert config.speculation.network is not None
    scheduler, kv_budget = config.scheduler, config.speculation.network.kv_budget
    attended = None
    if kv_budget is not None:
        assert isinstance(target, CausalLM), "load_self refuses others"
        budget = BlockBudget.of_tokens(kv_budget, cache.block_size)
        attended = AttendedBlocks(target, cache, budget, scheduler.max_num_seqs)
    return SelfDrafter(model, cache, scheduler.max_num_batched_tokens, attended)


def _layered_drafter(
    config: DraftNetworkConfig,
    drafter: LoadedDrafter,
    memory: MemoryPlan,
    device: torch.device,
    scheduler: SchedulerConfig,
) -> NetworkDrafter | ParallelDrafter | BlockDrafter:
    """Build the drafter of a network with its own layers, which reads its drafts or mask tokens."""
    loaded, layers, mask = drafter.network, drafter.layers, drafter.mask_token_id
    assert layers is not None
    window, mask_state_D = None, None
    if drafter.feature_size:
        size, dtype = drafter.feature_size, drafter.network.dtype
        window = StateWindow(scheduler.max_num_seqs, size, dtype, device, drafter.state_window)
        if isinstance(loaded, EagleNetwork) and config.parallel_drafting and mask is not None:
            mask_state_D = loaded.mask_state()
    assert not isinstance(loaded, MedusaHeads | MLPSpeculator)
    spare = scheduler.max_num_seqs * drafter.spare_blocks(memory.block_size)
    cache = kv_cache(layers, memory, drafter.network.dtype, device, spare)
    if isinstance(loaded, DFlashNetwork):
        assert window is not None
        max_rows = scheduler.max_num_batched_tokens
        return BlockDrafter(loaded, cache, max_rows, config.source, window)
    place = DraftNetwork(loaded), cache, scheduler.max_num_batched_tokens, config.source
    if not config.parallel_drafting:
        return NetworkDrafter(*place, window)
    if mask is None:
        raise ConfigError(
            f"{config.model!r} was not trained for parallel_drafting: it names no mask token"
        )
    return ParallelDrafter(*place, mask, window, mask_state_D)


def kv_cache(
    layers: ModelShape,
    memory: MemoryPlan,
    dtype: torch.dtype,
    device: torch.device,
    num_spare: int = 0,
) -> KVCache:
    """Make the cache of these layers: the blocks of the pool, then `num_spare` more that the pool
    does not manage."""
    num_blocks = memory.num_blocks + num_spare
    return KVCache(layers.cache_shapes, num_blocks, memory.block_size, dtype, device)


def host_proposers(sources: Sequence[SourceConfig], kernels: Kernels) -> list[HostProposer]:
    """Make the proposers of the sources that draft on the host."""
    proposers: list[HostProposer] = []
    for source in sources:
        if isinstance(source, NgramConfig):
            proposers.append(NgramProposer(source, kernels))
        elif isinstance(source, SuffixConfig):
            proposers.append(SuffixProposer(source, kernels))
    return proposers


def load_self(
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
    """Raise ConfigError if a layer has a window, or the transformers library computes it."""
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
