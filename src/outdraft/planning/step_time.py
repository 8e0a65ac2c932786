"""Time of a step: a roofline of its bytes, operations, launches and messages, or that roofline
scaled to a few measured points.

control/roofline.py has the formula of a pass. Two all-reduces a layer and the host's part of a step
do not overlap with it.

Requests come and go: while the others decode, each new one brings its prompt's rows into a step.
How many arrive during a step is Poisson.

The scaled roofline is a straight line in four numbers: how much of a lone request's plain step, of
what further rows add to it, and of the drafting is real, and what each row adds that the roofline
does not know. Without points the first three are 1 and the last is 0; every point pulls them to
what was measured (ridge regression, Hoerl and Kennard 1970), so one point helps and nine leave
little to guess.

Dimension key: P numbers of arriving prompts; in `_ridge` measured points.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from outdraft.config.fields import read_text
from outdraft.control.roofline import overlapped, pass_s
from outdraft.core.errors import ConfigError
from outdraft.planning.hardware import Hardware, hardware_data
from outdraft.planning.shapes import BYTES, Network

_MEGA = 1e6
# How far from (1, 1, 1, 0) the four numbers may well be, one standard deviation each. The last one
# is in lone plain steps for each _ROWS rows.
_SPREAD = (0.4, 0.6, 0.6, 0.4)
_EXPECTED = (1.0, 1.0, 1.0, 0.0)
_ROWS = 256
_NOISE = 0.04  # standard deviation of a measured step, of what the line cannot follow, too
_WIDTH = 1.64  # standard deviations of the band: nine of ten steps


@dataclass(frozen=True, slots=True)
class Setup:
    """Networks, the cards that run them, and the requests.

    Attributes:
        method: "draft_model", "eagle3", "medusa", or a source of the host, without a drafter.
        tp: cards that share the target, and
        draft_tp: a drafter. All cards of the target draft: groups of `draft_tp` cards, each with a
            drafter of its own, for a part of the requests.
        prompt_tokens, output_tokens: of a mean request.
    """

    target: Network
    method: str
    drafter: Network | None
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
            return replace(self, hardware=replace(self.hardware, **{name: value}))

        return [
            (with_constant(name, low), with_constant(name, high))
            for name, (low, high) in self.hardware.ranges.items()
            if low != high
        ]

    def drafting_network(self, length: int) -> Network:
        """The drafter as a draft of this length reads it: Medusa has a head for each token."""
        assert self.drafter is not None
        heads = length if self.method == "medusa" else 1
        return replace(self.drafter, head_parameters=heads * self.drafter.head_parameters)

    def num_passes(self, length: int) -> int:
        """Passes of the drafter for a draft of this length."""
        if self.drafter is None:
            return 0
        return min(length, 1) if self.method == "medusa" else length


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
    shares_P = _arrivals((num_requests - 1) * tokens_a_step / setup.output_tokens)
    prompts_P = np.arange(len(shares_P))
    rows, context = num_requests * (1 + length), num_requests * setup.context_tokens
    rows_P, picked_P = rows + prompts_P * setup.prompt_tokens, rows + prompts_P
    place = setup.hardware, setup.tp, setup.tp
    target_P, messages_P = _pass(setup.target, *place, rows_P, picked_P, context)
    draft_P, draft_messages_P = np.zeros_like(target_P), np.zeros_like(target_P)
    if setup.num_passes(length):
        draft_P, draft_messages_P = _draft(setup, num_requests, prompts_P, length)
    times_P = target_P, draft_P, messages_P, draft_messages_P
    host_us = setup.hardware.step_us + num_requests * setup.hardware.request_us
    return StepTime(*(float(shares_P @ one_P) for one_P in times_P), host_s=host_us / _MEGA)


def _draft(
    setup: Setup, num_requests: int, prompts_P: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of drafting, and of its messages.

    Groups draft at the same time, so the one counts that has the most requests and prompts.
    """
    groups = setup.tp // setup.draft_tp
    busy = min(groups, num_requests) * setup.draft_tp
    place = setup.hardware, setup.draft_tp, busy
    own, own_prompts_P = -(-num_requests // groups), -(-prompts_P // groups)
    context = own * setup.context_tokens
    one_each_P = np.full_like(prompts_P, own)
    # The first pass reads what the last step brought, too, and new prompts.
    read_P = own * (1 + length) + own_prompts_P * setup.prompt_tokens
    network, num_passes = setup.drafting_network(length), setup.num_passes(length)
    first, first_messages = _pass(network, *place, read_P, one_each_P, context)
    later, later_messages = _pass(network, *place, one_each_P, one_each_P, context)
    extra_bytes = network.extra_parameters * BYTES[network.dtype] / setup.draft_tp
    extra_s = extra_bytes / setup.hardware.bytes_per_s(busy)
    host_s = num_passes * setup.hardware.draft_us / _MEGA
    seconds_P = first + (num_passes - 1) * later + extra_s + host_s
    return seconds_P, first_messages + (num_passes - 1) * later_messages


def _arrivals(mean: float) -> np.ndarray:
    """Chance of each number of arrivals."""
    most = math.ceil(mean + 6 * math.sqrt(mean) + 4)
    logs = [n * math.log(mean) - mean - math.lgamma(n + 1) for n in range(most)] if mean else [0.0]
    shares = np.exp(logs)
    return shares / shares.sum()


def _pass(
    network: Network,
    hardware: Hardware,
    num_cards: int,
    num_busy: int,
    rows_P: np.ndarray,
    picked_P: np.ndarray,
    context: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of computing, and of messages.

    Args:
        num_cards: that share the network, of
        num_busy: that compute at the same time.
        rows_P: of the pass, and
        picked_P: those that logits are computed for.
        context: tokens of all requests in the cache.
    """
    bandwidth = hardware.bytes_per_s(num_busy) * num_cards
    peak = hardware.operations_per_s(network.dtype) * num_cards
    layers_P = overlapped(
        network.layer_bytes(rows_P) / bandwidth, network.row_operations * rows_P / peak
    )
    head_s = network.head_parameters * BYTES["bf16"] / bandwidth
    head_operations_P = 2.0 * network.head_parameters * picked_P
    head_P = overlapped(head_s, head_operations_P / (hardware.operations_per_s("bf16") * num_cards))
    computing_P = layers_P + head_P + context * network.kv_bytes_per_token / bandwidth
    seconds_P = np.asarray(
        pass_s(computing_P, network.num_layers, hardware.launch_s, hardware.begin_s)
    )
    if num_cards == 1 or hardware.link is None:
        return seconds_P, np.zeros_like(seconds_P)
    row_bytes_P = rows_P * network.hidden_size * BYTES["bf16"]
    one_P = hardware.all_reduce_s(row_bytes_P, num_cards) * hardware.communication_factor
    return seconds_P, (2 * network.num_layers + 1) * one_P


# A mean step, and the least and the most seconds of a band that holds most of what is measured.
PredictedStep = tuple[StepTime, float, float]


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: TPOT, and tokens that a step brought to a request, 1 without drafts."""

    num_requests: int
    length: int
    tpot_s: float
    tokens: float


class RooflinePredictor:
    """Nothing measured. The band: each constant at the ends of its range, combined in squares.

    Where published steps of a kind took longer than the roofline said, as data/hardware.json notes,
    the band reaches as far as they did. Kinds are dtypes of weights, and ways to draft.
    """

    mode = "roofline"

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._variants = setup.variants()
        drafter = setup.drafter.dtype if setup.drafter is not None else ""
        kinds = setup.target.dtype, drafter, setup.method
        factors = {kind: 1 / (1 - one["share"]) for kind, one in hardware_data()["missed"].items()}
        self._missed = [factors.get(kind, 1.0) - 1 for kind in kinds]
        self.basis = "Published numbers of the hardware, nothing measured." + "".join(
            f" Published steps with {kind} took up to {factors[kind]:.2f} times as long: "
            "the band reaches that far, the middle does not."
            for kind in dict.fromkeys(kinds)
            if kind in factors
        )

    def step(self, num_requests: int, length: int, tokens: float) -> StepTime:
        """A mean step of requests that each draft `length` tokens and gain `tokens`."""
        return step_time(self.setup, num_requests, length, tokens)

    def predict(self, num_requests: int, length: int, tokens: float) -> PredictedStep:
        step = self.step(num_requests, length, tokens)
        below = above = 0.0
        for pair in self._variants:
            ends = [step_time(one, num_requests, length, tokens).total_s for one in pair]
            below += min(0.0, *(end - step.total_s for end in ends)) ** 2
            above += max(0.0, *(end - step.total_s for end in ends)) ** 2
        # The most that published steps of these kinds took beyond the roofline.
        target, drafter, method = self._missed
        weights_s = target * step.verification_s + drafter * step.drafting_s
        above += max(weights_s, method * step.total_s if step.drafting_s else 0.0) ** 2
        low_s, high_s = step.total_s - math.sqrt(below), step.total_s + math.sqrt(above)
        return step, max(0.0, low_s), high_s


class CalibratedPredictor:
    """Fitted to points. The band: what the points leave open, and their noise."""

    mode = "calibrated"

    def __init__(self, setup: Setup, points: Sequence[Point]) -> None:
        """
        Raises:
            ConfigError: there is no point, or one has no time.
        """
        if not points:
            raise ConfigError("calibration needs a measured point")
        for point in points:
            is_counted = point.num_requests >= 1 and 1 <= point.tokens <= point.length + 1
            if not is_counted or not 0 < point.tpot_s < math.inf:
                raise ConfigError(
                    "a measured point needs a concurrency of at least 1, a length of at least 0, a "
                    f"TPOT above 0, and 1 to length + 1 tokens a step, got {point}"
                )
        self.setup = setup
        parts = np.array([self._parts(p.num_requests, p.length, p.tokens) for p in points])
        seconds = np.array([point.tpot_s * point.tokens for point in points])
        self._scales, self._doubt = _ridge(parts / seconds[:, None])
        self.basis = f"{len(points)} measured points"

    def step(self, num_requests: int, length: int, tokens: float) -> StepTime:
        roofline = step_time(self.setup, num_requests, length, tokens)
        parts = self._parts(num_requests, length, tokens)
        verification_s = float(parts[[0, 1, 3]] @ self._scales[[0, 1, 3]])
        target, draft = verification_s / roofline.verification_s, float(self._scales[2])
        scales = target, draft, target, draft, target
        return StepTime(*(a * b for a, b in zip(scales, astuple(roofline), strict=True)))

    def predict(self, num_requests: int, length: int, tokens: float) -> PredictedStep:
        step = self.step(num_requests, length, tokens)
        parts = self._parts(num_requests, length, tokens)
        open_s = math.sqrt(float(parts @ self._doubt @ parts))
        half_s = _WIDTH * math.hypot(open_s, _NOISE * step.total_s)
        return step, max(0.0, step.total_s - half_s), step.total_s + half_s

    def _parts(self, num_requests: int, length: int, tokens: float) -> np.ndarray:
        """Seconds that the four numbers multiply."""
        lone_s = step_time(self.setup, 1, 0, 1.0).total_s
        step = step_time(self.setup, num_requests, length, tokens)
        arrivals = (num_requests - 1) * tokens / self.setup.output_tokens
        rows = num_requests * (1 + length) + arrivals * self.setup.prompt_tokens - 1
        return np.array(
            [lone_s, step.verification_s - lone_s, step.drafting_s, rows * lone_s / _ROWS]
        )


def _ridge(parts_P4: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Four numbers, none below 0, whose sums are near 1, and their covariance.

    Numbers that would be below 0 are 0, and the others are fitted again.
    """
    kept = np.ones(4, bool)
    spread, expected = np.array(_SPREAD), np.array(_EXPECTED)
    while True:
        parts = parts_P4[:, kept] / _NOISE
        precision = parts.T @ parts + np.diag(1 / spread[kept] ** 2)
        doubt = np.linalg.inv(precision)
        pull = parts.sum(0) / _NOISE + expected[kept] / spread[kept] ** 2
        scales = doubt @ pull
        if (scales >= 0).all():
            break
        kept[np.flatnonzero(kept)[scales < 0]] = False
    whole, covariance = np.zeros(4), np.zeros((4, 4))
    whole[kept] = scales
    covariance[np.ix_(kept, kept)] = doubt
    return whole, covariance


Predictor = RooflinePredictor | CalibratedPredictor


def choose_predictor(setup: Setup, points: Sequence[Point]) -> Predictor:
    """Calibrated by the points, and checked by leaving out each; without points the roofline."""
    if not points:
        return RooflinePredictor(setup)
    predictor = CalibratedPredictor(setup, points)
    if errors := left_out_errors(setup, points):
        mean = sum(map(abs, errors)) / len(errors)
        predictor.basis += f"; each, left out, is predicted within {mean:.1%} on average"
    predictor.basis += "."
    return predictor


def left_out_errors(setup: Setup, points: Sequence[Point]) -> list[float]:
    """Relative error of each point's step when the others alone calibrate; [] for one point."""
    if len(points) < 2:
        return []
    errors: list[float] = []
    for place, point in enumerate(points):
        others = CalibratedPredictor(setup, [*points[:place], *points[place + 1 :]])
        step = others.step(point.num_requests, point.length, point.tokens)
        errors.append(step.total_s / point.tokens / point.tpot_s - 1)
    return errors


def read_points(values: Iterable[str], tokens_of: Sequence[float]) -> list[Point]:
    """Points from files and from words such as "8:0:47.8" or "1:5:12.95:4.52".

    A word is concurrency:length:TPOT in ms[:tokens a step]. A file is a table with these columns
    (commas or tabs; concurrency, k, mean_tpot_ms or tpot_ms, acceptance_length), or a JSON list.

    Args:
        tokens_of: tokens a step by length, for points that do not say.

    Raises:
        ConfigError: a value is none of these.
    """
    rows: list[dict[str, Any]] = []
    for value in values:
        parts = value.split(":")
        if Path(value).is_file():
            rows += _read_file(Path(value))
        elif 3 <= len(parts) <= 4:
            names = ("concurrency", "k", "tpot_ms", "acceptance_length")
            rows.append(dict(zip(names, parts, strict=False)))
        else:
            raise ConfigError(
                "a measured point is a file or concurrency:length:tpot_ms[:acceptance_length], "
                f"got {value!r}"
            )
    return [_point(row, tokens_of) for row in rows]


def _read_file(path: Path) -> list[dict[str, Any]]:
    text = read_text(path, str(path))
    if path.suffix == ".json":
        try:
            return msgspec.json.decode(text, type=list[dict[str, Any]])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} must hold a JSON list of points: {error}") from error
    return list(csv.DictReader(text.splitlines(), delimiter="\t" if "\t" in text else ","))


def _point(row: dict[str, Any], tokens_of: Sequence[float]) -> Point:
    try:
        length = int(row["k"])
        tpot_ms = float(row.get("mean_tpot_ms") or row["tpot_ms"])
        known = tokens_of[length] if length < len(tokens_of) else None
        tokens = float(row.get("acceptance_length") or (known if length else 1.0))  # type: ignore[arg-type]
        return Point(int(row["concurrency"]), length, tpot_ms / 1e3, tokens)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"no measured point: {row!r}: {error!r}") from error
