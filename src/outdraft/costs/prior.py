"""Estimates the costs of an engine's steps before any measurement, by rooflines of its networks."""

from dataclasses import replace

import torch

from outdraft.config.engine import EngineConfig
from outdraft.control.costs import CostTable
from outdraft.control.roofline import ROWS, MachineLimits, PassSize, prior_table
from outdraft.kv.cache import KVCache
from outdraft.loading.methods import LoadedDrafter
from outdraft.loading.models import LoadedModels
from outdraft.models.base import LanguageModel
from outdraft.models.shape import ModelShape
from outdraft.runner.parallel_runner import StepRunner

# Moderate machines, for where none was measured.
CPU = MachineLimits(
    bandwidth=20e9,
    peak=100e9,  # of one thread
    call_s=60e-6,
    host_s=120e-6,
    host_request_s=20e-6,
    host_draft_s=80e-6,
)
GPU = MachineLimits(
    bandwidth=1.5e12,
    peak=2e14,
    launch_s=60e-6,
    call_s=500e-6,
    host_s=500e-6,
    host_request_s=20e-6,
    host_draft_s=100e-6,
)


def roofline(
    config: EngineConfig, models: LoadedModels, runner: StepRunner, machine: MachineLimits
) -> CostTable:
    """Make the prior of an engine from control/roofline.py."""
    rows = [count for count in ROWS if count <= config.scheduler.max_num_batched_tokens]
    drafters: dict[str, tuple[PassSize, int]] = {}
    proposer = runner.proposer
    if proposer is not None and models.drafter is not None:
        source = str(proposer.drafter.source)
        drafters[source] = _drafter_size(models.drafter), proposer.max_passes
    table = prior_table(machine, _target_size(models.target), drafters, rows)
    if models.drafter is None or models.drafter.max_context is None:
        return table
    most, target = models.drafter.max_context, models.target
    token_bytes = _token_bytes(target.shard, target.dtype) * models.drafter.num_taps
    key_bytes = token_bytes / (2 * target.shard.num_layers)  # of the layers that it attends to
    reading_less = {
        name: replace(cost, max_context=most, look_s=key_bytes / machine.bandwidth)
        for name, cost in table.drafters.items()
    }
    return replace(table, drafters=reading_less)


def default_machine(device: torch.device) -> MachineLimits:
    """Assume a moderate machine."""
    if device.type != "cpu":
        return GPU
    return replace(CPU, peak=CPU.peak * torch.get_num_threads())


def _target_size(model: LanguageModel) -> PassSize:
    """The size of a pass of this rank's part."""
    config = model.shard
    layer = config.hidden_size * 2 * (config.num_heads + config.num_kv_heads) * config.head_size
    layer += 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * layer + model.vocabulary.width * config.hidden_size
    token_bytes = _token_bytes(config, model.dtype)
    routed = model.routed
    always_bytes = model.weight_bytes - (0 if routed is None else routed.nbytes)
    return PassSize(always_bytes, 2 * weights, token_bytes, config.num_layers, routed)


def _drafter_size(drafter: LoadedDrafter) -> PassSize:
    """Operations follow from bytes, as if all weights were kept in the network's dtype."""
    network, layers = drafter.network, drafter.layers
    num_bytes = network.weight_bytes
    operations = 2 * num_bytes // network.dtype.itemsize
    if layers is None:
        return PassSize(num_bytes, operations, 0, drafter.max_drafts)
    token_bytes = _token_bytes(layers, network.dtype)
    return PassSize(num_bytes, operations, token_bytes, layers.num_layers)


def _token_bytes(config: ModelShape, dtype: torch.dtype) -> int:
    """Keys and values of one token."""
    return KVCache.bytes_per_block(config.cache_shapes, 1, dtype)
