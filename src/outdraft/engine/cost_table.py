"""What steps of an engine cost: a table for the controller, ready before the first request."""

import torch

from outdraft.config.engine import EngineConfig
from outdraft.control.costs import CostTable
from outdraft.control.roofline import ROWS, Machine, PassSize, prior_table
from outdraft.engine.drafters import LoadedDrafter
from outdraft.engine.loading import LoadedModels
from outdraft.models.config import ModelConfig
from outdraft.models.llama import CausalLM
from outdraft.runner.model_runner import ModelRunner

# Machines that nobody has measured: moderate ones.
CPU_BANDWIDTH, CPU_PEAK = 20e9, 100e9  # bytes/s; operations/s of one thread
GPU = Machine(bandwidth=1.5e12, peak=2e14, layer_s=60e-6, call_s=500e-6)
CPU_CALL_S = 200e-6


def cost_table(config: EngineConfig, models: LoadedModels, runner: ModelRunner) -> CostTable:
    """The costs of an engine whose runner is idle and serves nobody yet."""
    rows = [count for count in ROWS if count <= config.scheduler.max_num_batched_tokens]
    return roofline(models, runner, default_machine(models.device), rows)


def roofline(
    models: LoadedModels, runner: ModelRunner, machine: Machine, rows: list[int]
) -> CostTable:
    """The prior of an engine, see control/roofline.py."""
    drafters: dict[str, tuple[PassSize, int]] = {}
    proposer = runner.proposer
    if proposer is not None and models.drafter is not None:
        source = str(proposer.drafting.source)
        drafters[source] = _drafter_size(models.drafter), proposer.max_passes
    return prior_table(machine, _target_size(models.target), drafters, rows)


def default_machine(device: torch.device) -> Machine:
    """A machine that nobody has measured."""
    if device.type != "cpu":
        return GPU
    peak = CPU_PEAK * torch.get_num_threads()
    return Machine(CPU_BANDWIDTH, peak, call_s=CPU_CALL_S)


def _target_size(model: CausalLM) -> PassSize:
    config = model.config
    layer = config.hidden_size * 2 * (config.num_heads + config.num_kv_heads) * config.head_size
    layer += 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    token_bytes = _token_bytes(config, model.dtype)
    return PassSize(model.weight_bytes, 2 * weights, token_bytes, config.num_layers)


def _drafter_size(drafter: LoadedDrafter) -> PassSize:
    """Its operations follow from its bytes, as if all weights were kept in its own dtype."""
    network, layers = drafter.network, drafter.layers
    num_bytes = network.weight_bytes
    operations = 2 * num_bytes // network.dtype.itemsize
    if layers is None:
        return PassSize(num_bytes, operations, 0, drafter.max_drafts)
    token_bytes = _token_bytes(layers, network.dtype)
    return PassSize(num_bytes, operations, token_bytes, layers.num_layers)


def _token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_size * dtype.itemsize
