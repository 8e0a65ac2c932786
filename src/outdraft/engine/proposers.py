"""From a loaded network to what drafts with it."""

from dataclasses import dataclass

import torch

from outdraft.config.engine import EngineConfig
from outdraft.config.speculation import DraftNetworkConfig
from outdraft.core.errors import ConfigError
from outdraft.drafting.device.draft_network import EagleDraftNetwork, LanguageModelNetwork
from outdraft.drafting.device.head_drafter import MedusaDrafter, MLPSpeculatorDrafter
from outdraft.drafting.device.network_drafter import NetworkDrafter
from outdraft.drafting.device.parallel_drafting import ParallelDrafter
from outdraft.drafting.device.proposer import DeviceProposer, Drafter
from outdraft.drafting.device.text_reader import MaskStates
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
    drafting: Drafter
    if isinstance(loaded, MedusaHeads):
        drafting = MedusaDrafter(loaded, num_seqs)
    elif isinstance(loaded, MLPSpeculator):
        drafting = MLPSpeculatorDrafter(loaded, num_seqs)
    else:
        place = _Place(drafter, memory, device, config.scheduler.max_num_batched_tokens)
        drafting = place.drafter_of(network)
    return DeviceProposer(drafting, network.tree, samples=network.samples)


@dataclass(frozen=True, slots=True)
class _Place:
    """A network with layers of its own, and its place in the pool."""

    drafter: LoadedDrafter
    memory: MemoryPlan
    device: torch.device
    max_rows: int

    def drafter_of(self, network: DraftNetworkConfig) -> NetworkDrafter | ParallelDrafter:
        """It reads its own drafts, or mask tokens."""
        loaded, mask = self.drafter.network, self.drafter.mask_token_id
        mask_states: MaskStates | None = None
        if isinstance(loaded, EagleNetwork):
            features = self._features()
            reading = EagleDraftNetwork(loaded, features)
            if network.parallel_drafting and mask is not None:
                mask_states = MaskStates(loaded.mask_state(), features)
        else:
            assert not isinstance(loaded, MedusaHeads | MLPSpeculator)
            reading = LanguageModelNetwork(loaded)
        place = reading, self._cache(), self.max_rows, network.source
        if not network.parallel_drafting:
            return NetworkDrafter(*place)
        if mask is None:
            raise ConfigError(
                f"{network.model!r} was not trained for parallel_drafting: it names no mask token"
            )
        return ParallelDrafter(*place, mask, mask_states)

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
