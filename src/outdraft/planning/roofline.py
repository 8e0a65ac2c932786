"""Time of a step by its bytes, its operations, its launches and its messages.

control/roofline.py has the formula of a pass. Two all-reduces a layer and the host's part of a step
do not overlap with it.

Requests come and go: while the others decode, each new one brings its prompt's rows into a step.
How many arrive during a step is Poisson.

Dimension key: P numbers of arriving prompts.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from outdraft.control.roofline import overlapped, pass_s
from outdraft.core.errors import ConfigError
from outdraft.planning.hardware import Hardware
from outdraft.planning.shapes import BYTES, Network, PlannedDrafter

_MEGA = 1e6


@dataclass(frozen=True, slots=True)
class Setup:
    """Networks, the cards that run them, and the requests.

    Attributes:
        tp: cards that share the target, and
        draft_tp: a drafter. All cards of the target draft: groups of `draft_tp` cards, each with a
            drafter of its own, for a part of the requests.
        prompt_tokens, output_tokens: of a mean request.
    """

    target: Network
    drafter: PlannedDrafter
    hardware: Hardware
    tp: int = 1
    draft_tp: int = 1
    prompt_tokens: int = 256
    output_tokens: int = 256

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: there are fewer cards than one of the two is to be shared by, or groups
                that share a drafter do not divide the target's cards.
        """
        cards = self.hardware.num_cards
        if not 1 <= self.tp <= cards or not 1 <= self.draft_tp <= cards:
            raise ConfigError(
                f"tp {self.tp} and draft_tp {self.draft_tp} must be between 1 and the {cards} cards"
            )
        if self.tp % self.draft_tp:
            raise ConfigError(f"draft_tp {self.draft_tp} must divide tp {self.tp}")

    @property
    def context_tokens(self) -> float:
        """Tokens in the cache of a request, on average while it decodes."""
        return self.prompt_tokens + self.output_tokens / 2

    def variants(self) -> list[tuple["Setup", "Setup"]]:
        """With one constant of the machine at the ends of its range, for each constant."""

        def with_constant(name: str, value: float) -> Setup:
            card = replace(self.hardware.card, **{name: value})
            return replace(self, hardware=replace(self.hardware, card=card))

        return [
            (with_constant(name, low), with_constant(name, high))
            for name, (low, high) in self.hardware.card.ranges.items()
            if low != high
        ]


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
    """A mean step of requests that each draft `length` tokens.

    Args:
        tokens_a_step: of a request, the bonus token included: what decides how soon the next
            prompt comes.
    """
    card = setup.hardware.card
    shares_P = _arrivals((num_requests - 1) * tokens_a_step / setup.output_tokens)
    prompts_P = np.arange(len(shares_P))
    rows = _PassRows(
        num_requests * (1 + length) + prompts_P * setup.prompt_tokens,
        num_requests * (1 + length) + prompts_P,
        num_requests * setup.context_tokens,
    )
    target_P, messages_P = _pass(setup.target, setup.hardware, setup.tp, setup.tp, rows)
    draft_P, draft_messages_P = np.zeros_like(target_P), np.zeros_like(target_P)
    if setup.drafter.num_passes(length):
        draft_P, draft_messages_P = _draft(setup, num_requests, prompts_P, length)
    return StepTime(
        target_s=float(shares_P @ target_P),
        draft_s=float(shares_P @ draft_P),
        target_communication_s=float(shares_P @ messages_P),
        draft_communication_s=float(shares_P @ draft_messages_P),
        host_s=(card.step_us + num_requests * card.request_us) / _MEGA,
    )


@dataclass(frozen=True, slots=True)
class _PassRows:
    """Rows of a pass, by number of arriving prompts.

    Attributes:
        all_P: its rows, and
        picked_P: those that logits are computed for.
        context: tokens of all requests in the cache.
    """

    all_P: np.ndarray
    picked_P: np.ndarray
    context: float


def _draft(
    setup: Setup, num_requests: int, prompts_P: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of drafting, and of its messages.

    Groups draft at the same time, so the one counts that has the most requests and prompts.
    """
    groups, place = setup.tp // setup.draft_tp, (setup.hardware, setup.draft_tp)
    busy = min(groups, num_requests) * setup.draft_tp
    own, own_prompts_P = -(-num_requests // groups), -(-prompts_P // groups)
    context = own * setup.context_tokens
    one_each_P = np.full_like(prompts_P, own)
    # The first pass reads what the last step brought, too, and new prompts.
    read_P = own * (1 + length) + own_prompts_P * setup.prompt_tokens
    network, num_passes = setup.drafter.shape(length), setup.drafter.num_passes(length)
    first, first_messages = _pass(network, *place, busy, _PassRows(read_P, one_each_P, context))
    later, later_messages = _pass(network, *place, busy, _PassRows(one_each_P, one_each_P, context))
    extra_bytes = network.extra_parameters * BYTES[network.dtype] / setup.draft_tp
    extra_s = extra_bytes / setup.hardware.bandwidth(busy)
    host_s = num_passes * setup.hardware.card.draft_us / _MEGA
    seconds_P = first + (num_passes - 1) * later + extra_s + host_s
    return seconds_P, first_messages + (num_passes - 1) * later_messages


def mean_rows(setup: Setup, num_requests: int, length: int, tokens_a_step: float) -> float:
    """Rows of a mean step, prompts included."""
    arrivals = (num_requests - 1) * tokens_a_step / setup.output_tokens
    return num_requests * (1 + length) + arrivals * setup.prompt_tokens


def _arrivals(mean: float) -> np.ndarray:
    """Chance of each number of arrivals."""
    most = math.ceil(mean + 6 * math.sqrt(mean) + 4)
    logs = [n * math.log(mean) - mean - math.lgamma(n + 1) for n in range(most)] if mean else [0.0]
    shares = np.exp(logs)
    return shares / shares.sum()


def _pass(
    network: Network, hardware: Hardware, num_cards: int, num_busy: int, rows: _PassRows
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of computing, and of messages.

    Args:
        num_cards: that share the network, of
        num_busy: that compute at the same time.
    """
    card = hardware.card
    bandwidth = hardware.bandwidth(num_busy) * num_cards
    peak = card.peak(network.dtype) * card.compute_efficiency * num_cards
    layers_P = overlapped(
        network.layer_bytes(rows.all_P) / bandwidth, network.row_operations * rows.all_P / peak
    )
    head_peak = card.peak("bf16") * card.compute_efficiency * num_cards
    head_bytes = network.head_parameters * BYTES["bf16"]
    head_operations = 2.0 * network.head_parameters
    head_P = overlapped(head_bytes / bandwidth, head_operations * rows.picked_P / head_peak)
    kv_s = rows.context * network.kv_bytes_per_token / bandwidth
    computing_P = layers_P + head_P + kv_s
    seconds_P = np.asarray(
        pass_s(computing_P, network.num_layers, hardware.launch_s, hardware.begin_s)
    )
    if num_cards == 1 or hardware.link is None:
        return seconds_P, np.zeros_like(seconds_P)
    row_bytes_P = rows.all_P * network.hidden_size * BYTES["bf16"]
    one_P = hardware.link.all_reduce_s(row_bytes_P, num_cards) * card.communication_factor
    return seconds_P, (2 * network.num_layers + 1) * one_P
