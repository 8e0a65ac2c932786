"""Limits of machines, the shares of them that are reached, and links between cards.

The numbers are in data/hardware.json: vendors' own for dense operations, and a few constants, each
with a range and where it comes from. No constant belongs to a model or to a card.
"""

import json
import math
import re
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from outdraft.core.errors import ConfigError, did_you_mean
from outdraft.models.checkpoints.config_json import read_json

_GB = 1e9
_MEGA = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Cards of one kind, or sockets, that compute together, and the link that all-reduces travel
    over.

    Attributes:
        bandwidth: bytes a second that a card reads.
        memory_bytes: of a card.
        peaks: operations a second by dtype.
        ranges: (lowest, highest) of each constant by its name. The constants say what is reached of
            the peaks, and what no peak explains, in us; data/hardware.json explains each.
        graphs: "full", "piecewise" (attention outside) or "none".
        shared_bandwidth: bytes a second, as a card's, of a memory that all cards share: ranks on
            one CPU. None: each card has its own.
        link: its name; None: there is one card.
        link_bandwidth: bytes a second in one direction.
    """

    title: str
    bandwidth: float
    memory_bytes: float
    peaks: dict[str, float]
    ranges: dict[str, tuple[float, float]]
    bandwidth_efficiency: float
    compute_efficiency: float
    layer_us: float
    graph_break_us: float
    launch_us: float
    step_us: float
    request_us: float
    draft_us: float
    communication_factor: float
    num_cards: int = 1
    graphs: str = "full"
    shared_bandwidth: float | None = None
    link: str | None = None
    link_bandwidth: float = 0.0
    link_latency_s: float = 0.0
    link_latency_s_per_card: float = 0.0

    def all_reduce_s(self, num_bytes: Any, num_cards: int) -> Any:
        """Seconds for `num_bytes` of each card, a ring's volume; `num_bytes` may be an array."""
        latency_s = self.link_latency_s + (num_cards - 2) * self.link_latency_s_per_card
        return latency_s + 2 * (num_cards - 1) / num_cards * num_bytes / self.link_bandwidth

    def operations_per_s(self, dtype: str) -> float:
        """Operations a second in a dtype of weights; those without one are computed in bf16."""
        return self.peaks.get(dtype, self.peaks["bf16"]) * self.compute_efficiency

    def bytes_per_s(self, num_busy: int) -> float:
        """Bytes a second that each of `num_busy` cards reads while all of them read."""
        shared = math.inf if self.shared_bandwidth is None else self.shared_bandwidth / num_busy
        return min(self.bandwidth, shared) * self.bandwidth_efficiency

    @property
    def launch_s(self) -> float:
        """Seconds for the host to launch a layer: graphs are replayed without it."""
        return self.launch_us / _MEGA if self.graphs == "none" else 0.0

    @property
    def begin_s(self) -> float:
        """Seconds for the kernels of a layer of a graph to begin and to end."""
        if self.graphs == "none":
            return 0.0
        broken_us = self.graph_break_us if self.graphs == "piecewise" else 0.0
        return (self.layer_us + broken_us) / _MEGA


def find_hardware(text: str, interconnect: str | None = None, graphs: str = "full") -> Hardware:
    """Find a card by its name, and how many of them are linked.

    Args:
        text: such as "2xh100", "rtx-4090", or a JSON file that describes a card as hardware.json
            does.
        interconnect: a name in data/hardware.json; None: NVLink where the card has it, then PCIe.

    Raises:
        ConfigError: an unknown name, or a link that the card does not have.
    """
    if graphs not in ("full", "piecewise", "none"):
        raise ConfigError(f"graphs must be full, piecewise or none, got {graphs!r}")
    data = hardware_data()
    match = re.fullmatch(r"(?:(\d+)\s*x\s*)?(.+)", text.strip(), re.IGNORECASE)
    count = int(match[1] or 1) if match else 0
    if match is None or count < 1:
        raise ConfigError(f"hardware must be a name or Nxname, got {text!r}")
    name = match[2]
    if name.endswith(".json"):
        raw = read_json(Path(name))
    else:
        name = name.lower().replace("_", "-")
        if name not in data["cards"]:
            raise ConfigError(f"unknown hardware {name!r}: {did_you_mean(name, data['cards'])}")
        raw = data["cards"][name]
    try:
        ranges = data["constants"][raw["kind"]]
        hardware = Hardware(
            title=raw.get("title", name),
            bandwidth=raw["memory_gb_s"] * _GB,
            memory_bytes=raw["memory_gib"] * 2**30,
            peaks={dtype: value * 1e12 for dtype, value in raw["tflops"].items()},
            ranges={key: (one["low"], one["high"]) for key, one in ranges.items()},
            **{key: one["value"] for key, one in ranges.items()},
            num_cards=count,
            graphs=graphs,
        )
        if interconnect is None and count == 1:
            return hardware
        return _linked(hardware, interconnect, raw, data["links"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{name}: no description of a card: {error!r}") from error


def hardware_data() -> dict[str, Any]:
    """Read data/hardware.json."""
    return json.loads(files("outdraft.planning").joinpath("data/hardware.json").read_text("utf-8"))


def _linked(
    hardware: Hardware, name: str | None, card: dict[str, Any], links: dict[str, Any]
) -> Hardware:
    if name is None:
        usual = "pcie" if card.get("has_peer_access", True) else "pcie-no-p2p"
        name = "nvlink" if "nvlink_gb_s" in card else usual
    name = name.lower().replace("_", "-")
    if name not in links:
        raise ConfigError(f"unknown interconnect {name!r}: {did_you_mean(name, links)}")
    raw = links[name]
    if raw["bus"] not in card:
        known = ", ".join(one for one, link in links.items() if link["bus"] in card)
        raise ConfigError(f"{hardware.title} has no {name}; it has {known or 'no link'}")
    return replace(
        hardware,
        link=name,
        link_bandwidth=card[raw["bus"]] * _GB * raw["share"],
        link_latency_s=raw["latency_us"] * 1e-6,
        link_latency_s_per_card=raw["latency_us_per_card"] * 1e-6,
    )
