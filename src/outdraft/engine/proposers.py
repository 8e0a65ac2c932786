"""From a loaded network to what drafts with it."""

from dataclasses import dataclass

import torch

from outdraft.config.engine import EngineConfig
from outdraft.config.speculation import DraftNetworkConfig
from outdraft.core.errors import ConfigError
from outdraft.drafting.device.draft_network import EagleDraftNetwork, LanguageModelNetwork
from outdraft.drafting.device.head_proposer import MedusaProposer, MLPSpeculatorProposer
from outdraft.drafting.device.network_proposer import NetworkProposer
from outdraft.drafting.device.parallel_drafting import MaskTokens, ParallelDraftProposer
from outdraft.drafting.device.proposer import DeviceProposer
from outdraft.drafting.device.tree_proposer import TreeProposer
from outdraft.engine.drafters import LoadedDrafter
from outdraft.engine.memory import MemoryPlan
from outdraft.kv.cache import KVCache
from outdraft.kv.feature_cache import FeatureCache
from outdraft.models.eagle import EagleNetwork
from outdraft.models.medusa import MedusaHeads
from outdraft.models.mlp_speculator import MLPSpeculator


def device_proposer(
    config: EngineConfig, drafter: LoadedDrafter, memory: MemoryPlan, device: torch.device
) -> DeviceProposer:
    """Drafts with the network, in its part of the pool's blocks.

    Raises:
        ConfigError: the network cannot draft as the configuration asks.
    """
    network = config.speculation.network
    assert network is not None, "a drafter without a configuration"
    loaded, num_seqs = drafter.network, config.scheduler.max_num_seqs
    if isinstance(loaded, MedusaHeads):
        chains = MedusaProposer(loaded, num_seqs, samples=network.samples)
    elif isinstance(loaded, MLPSpeculator):
        chains = MLPSpeculatorProposer(loaded, num_seqs, samples=network.samples)
    else:
        place = _Place(drafter, memory, device, config.scheduler.max_num_batched_tokens)
        if network.parallel_drafting:
            return place.parallel_proposer(network)
        chains = place.proposer(network)
    if network.tree is None:
        return chains
    return TreeProposer(chains, network.tree, samples=network.samples)


@dataclass(frozen=True, slots=True)
class _Place:
    """A network with layers of its own, and its place in the pool."""

    drafter: LoadedDrafter
    memory: MemoryPlan
    device: torch.device
    max_rows: int

    def proposer(self, network: DraftNetworkConfig) -> NetworkProposer:
        """Reads its own drafts."""
        loaded = self.drafter.network
        if isinstance(loaded, EagleNetwork):
            drafting = EagleDraftNetwork(loaded, self._features())
        else:
            assert not isinstance(loaded, MedusaHeads | MLPSpeculator)
            drafting = LanguageModelNetwork(loaded)
        return NetworkProposer(
            drafting, self._cache(), self.max_rows, network.source, samples=network.samples
        )

    def parallel_proposer(self, network: DraftNetworkConfig) -> ParallelDraftProposer:
        """Reads mask tokens."""
        loaded, mask = self.drafter.network, self.drafter.mask_token_id
        if mask is None:
            raise ConfigError(
                f"{network.model!r} was not trained for parallel_drafting: it names no mask token"
            )
        if isinstance(loaded, EagleNetwork):
            features = self._features()
            drafting = EagleDraftNetwork(loaded, features)
            masks = MaskTokens(mask, loaded.mask_state(), features)
        else:
            assert not isinstance(loaded, MedusaHeads | MLPSpeculator)
            drafting, masks = LanguageModelNetwork(loaded), MaskTokens(mask)
        return ParallelDraftProposer(
            drafting, self._cache(), self.max_rows, network.source, masks, samples=network.samples
        )

    def _features(self) -> FeatureCache:
        memory, drafter = self.memory, self.drafter
        return FeatureCache(
            memory.num_blocks, memory.block_size, drafter.feature_size, drafter.dtype, self.device
        )

    def _cache(self) -> KVCache:
        layers = self.drafter.layers
        assert layers is not None
        return KVCache(
            layers.num_layers,
            self.memory.num_blocks,
            self.memory.block_size,
            layers.num_kv_heads,
            layers.head_size,
            self.drafter.dtype,
            self.device,
        )
