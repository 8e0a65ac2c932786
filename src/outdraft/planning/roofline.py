"""What a step takes by its bytes, its operations, its launches and its messages.

What a pass takes is said in control/roofline.py. Beside it stands what does not overlap: two
all-reduces a layer, and the host's part of a step.

Requests come and go: while the others decode, each new one brings its prompt's rows into a step.
How many arrive during a step is Poisson.

Dimension key: P numbers of arriving prompts.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from outdraft.control.roofline import Launches, overlapped
from outdraft.core.errors import ConfigError
from outdraft.planning.hardware import Card, Machine
from outdraft.planning.shapes import BYTES, Drafter, Network

_MEGA = 1e6


@dataclass(frozen=True, slots=True)
class Workload:
    """Mean tokens of a request's prompt and of its output."""

    prompt_tokens: int = 256
    output_tokens: int = 256

    @property
    def context_tokens(self) -> float:
        """Tokens in the cache of a request, on average while it decodes."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Setup:
    """Who runs where.

    Attributes:
        tp: cards that share the target, and
        draft_tp: the drafter.
    """

    target: Network
    drafter: Drafter
    machine: Machine
    tp: int = 1
    draft_tp: int = 1
    workload: Workload = Workload()

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: there are fewer cards than one of the two is to be shared by.
        """
        cards = self.machine.num_cards
        if not 1 <= self.tp <= cards or not 1 <= self.draft_tp <= cards:
            raise ConfigError(
                f"tp {self.tp} and draft_tp {self.draft_tp} must be between 1 and the {cards} cards"
            )

    def variants(self) -> list[tuple["Setup", "Setup"]]:
        """With one constant of the machine at the ends of its range, for each constant."""

        def on(card: Card) -> Setup:
            return replace(self, machine=replace(self.machine, card=card))

        return [(on(low), on(high)) for low, high in self.machine.card.variants()]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by part; what travels between cards stands apart."""

    target_s: float
    draft_s: float
    target_communication_s: float
    draft_communication_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        return self.verification_s + self.drafting_s

    @property
    def verification_s(self) -> float:
        return self.target_s + self.target_communication_s + self.host_s

    @property
    def drafting_s(self) -> float:
        return self.draft_s + self.draft_communication_s

    @property
    def communication_s(self) -> float:
        return self.target_communication_s + self.draft_communication_s


def step_time(setup: Setup, num_requests: int, length: int, tokens_a_step: float) -> StepTime:
    """A mean step of so many requests that each draft `length` tokens.

    Args:
        tokens_a_step: of a request, the bonus token included: what decides how soon the next
            prompt comes.
    """
    work, constants = setup.workload, setup.machine.card.constants
    shares_P = _arrivals((num_requests - 1) * tokens_a_step / work.output_tokens)
    prompts_P = np.arange(len(shares_P))
    context = num_requests * work.context_tokens
    prompt_rows_P = prompts_P * work.prompt_tokens
    rows_P = num_requests * (1 + length) + prompt_rows_P
    target_P, messages_P = _pass(
        setup.target,
        setup.machine,
        setup.tp,
        rows_P,
        num_requests * (1 + length) + prompts_P,
        context,
    )
    draft_P, draft_messages_P = np.zeros_like(target_P), np.zeros_like(target_P)
    num_passes = setup.drafter.num_passes(length)
    if num_passes:
        network = setup.drafter.shape(length)
        picked_P = np.full_like(rows_P, num_requests)
        place = (setup.machine, setup.draft_tp)
        # The first pass reads what the last step brought, too, and new prompts.
        first, first_messages = _pass(network, *place, rows_P, picked_P, context)
        later, later_messages = _pass(network, *place, picked_P, picked_P, context)
        extra_bytes = network.extra_parameters * BYTES[network.dtype] / setup.draft_tp
        extra_s = extra_bytes / setup.machine.card.bandwidth / constants.bandwidth_efficiency
        host_s = num_passes * constants.draft_us / _MEGA
        draft_P = first + (num_passes - 1) * later + extra_s + host_s
        draft_messages_P = first_messages + (num_passes - 1) * later_messages
    return StepTime(
        target_s=float(shares_P @ target_P),
        draft_s=float(shares_P @ draft_P),
        target_communication_s=float(shares_P @ messages_P),
        draft_communication_s=float(shares_P @ draft_messages_P),
        host_s=(constants.step_us + num_requests * constants.request_us) / _MEGA,
    )


def mean_rows(setup: Setup, num_requests: int, length: int, tokens_a_step: float) -> float:
    """Rows of a mean step, prompts included."""
    arrivals = (num_requests - 1) * tokens_a_step / setup.workload.output_tokens
    return num_requests * (1 + length) + arrivals * setup.workload.prompt_tokens


def _arrivals(mean: float) -> np.ndarray:
    """Chance of each number of arrivals."""
    most = math.ceil(mean + 6 * math.sqrt(mean) + 4)
    logs = [n * math.log(mean) - mean - math.lgamma(n + 1) for n in range(most)] if mean else [0.0]
    shares = np.exp(logs)
    return shares / shares.sum()


def _pass(
    network: Network,
    machine: Machine,
    num_cards: int,
    rows_P: np.ndarray,
    picked_P: np.ndarray,
    context: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of computing, and of messages.

    Args:
        rows_P: rows of the pass, and
        picked_P: those that logits are computed for.
        context: tokens of all requests in the cache.
    """
    card, constants = machine.card, machine.card.constants
    bandwidth = card.bandwidth * constants.bandwidth_efficiency * num_cards
    peak = card.peak(network.dtype) * constants.compute_efficiency * num_cards
    layers_P = overlapped(
        network.layer_bytes(rows_P) / bandwidth, network.row_operations * rows_P / peak
    )
    head_peak = card.peak("bf16") * constants.compute_efficiency * num_cards
    head_bytes = network.head_parameters * BYTES["bf16"]
    head_operations = 2.0 * network.head_parameters
    head_P = overlapped(head_bytes / bandwidth, head_operations * picked_P / head_peak)
    kv_s = context * network.kv_bytes_per_token / bandwidth
    seconds_P = np.asarray(_launches(machine).around(layers_P + head_P + kv_s, network.num_layers))
    if num_cards == 1 or machine.link is None:
        return seconds_P, np.zeros_like(seconds_P)
    row_bytes_P = rows_P * network.hidden_size * BYTES["bf16"]
    one_P = machine.link.all_reduce_s(row_bytes_P, num_cards) * constants.communication_factor
    return seconds_P, (2 * network.num_layers + 1) * one_P


def _launches(machine: Machine) -> Launches:
    """Graphs are replayed; without them the host tells each layer what to do."""
    constants = machine.card.constants
    if machine.graphs == "none":
        return Launches(floor_s=constants.launch_us / _MEGA)
    broken_us = constants.graph_break_us if machine.graphs == "piecewise" else 0.0
    return Launches(more_s=(constants.layer_us + broken_us) / _MEGA)
