"""Measured costs of a step: passes of the target and of networks, and the host.

Tables are frozen and travel as JSON. While the engine runs, corrections.py corrects what they say.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from outdraft.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds by a number of rows.

    Attributes:
        rows: ascending, at least one; where the time was measured.
        seconds: as many, never falling.
        has_stairs: rows are padded to the next measured number, as graphs do; else time grows
            in between.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    has_stairs: bool = False

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.seconds):
            raise ConfigError(f"{len(self.rows)} numbers of rows, {len(self.seconds)} times")
        if any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ConfigError(f"numbers of rows must ascend, got {self.rows}")
        if any(a > b for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise ConfigError(f"times must not fall with rows, got {self.seconds}")
        if self.seconds[0] < 0:
            raise ConfigError(f"times must not be negative, got {self.seconds[0]}")

    def at(self, num_rows: np.ndarray) -> np.ndarray:
        """Seconds by number of rows, of the same shape; 0 rows take no time.

        Beyond the table time grows as from its first point to its last.
        """
        rows, seconds = np.asarray(self.rows, float), np.asarray(self.seconds)
        if self.has_stairs:
            times = seconds[self.points(num_rows)]
        else:
            times = np.interp(num_rows, rows, seconds)
        beyond = np.maximum(num_rows - rows[-1], 0)
        times = times + beyond * (seconds[-1] - seconds[0]) / max(1, rows[-1] - rows[0])
        return np.where(np.asarray(num_rows) > 0, times, 0.0)

    def points(self, num_rows: np.ndarray) -> np.ndarray:
        """Indices of the measured points that stand for these numbers of rows."""
        return np.minimum(np.searchsorted(self.rows, num_rows), len(self.rows) - 1)

    def edge(self, num_rows: int) -> int | None:
        """Most rows of the same stair; None where there are no stairs, or beyond the last one."""
        if not self.has_stairs or num_rows > self.rows[-1]:
            return None
        return self.rows[int(self.points(np.array(num_rows)))]


@dataclass(frozen=True, slots=True)
class DrafterCost:
    """Seconds that a network takes.

    Attributes:
        passes: one pass by its rows; a chain has a row for each request.
        catch_up: reading, by the number of settled tokens that it has not read.
        start_s: more in each step in which it drafts, for however many requests.
        context_s: more for each token of the contexts, in each pass.
        max_passes: most passes of a draft, however deep it is.
        max_context: most tokens of a text that a pass attends to; None: all.
        look_s: more in each step in which it drafts, for each token of texts that are longer than
            that: it looks for the attended blocks in all of them.
    """

    passes: CostCurve
    catch_up: CostCurve
    start_s: float = 0.0
    context_s: float = 0.0
    max_passes: int = 63
    max_context: int | None = None
    look_s: float = 0.0

    def num_read(self, lengths: Iterable[int]) -> int:
        """Tokens of texts of these lengths that a pass attends to."""
        most = self.max_context
        return sum(lengths) if most is None else sum(min(length, most) for length in lengths)

    def step_s(self, lengths: Iterable[int]) -> float:
        """Seconds beside passes in a step in which it drafts, for texts of these lengths."""
        most = self.max_context
        if most is None or self.look_s == 0:
            return self.start_s
        return self.start_s + self.look_s * sum(length for length in lengths if length > most)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds that this machine takes for this pair of models.

    Attributes:
        target: a pass of the target by its rows, those of one request with an empty context, and
            what follows until ids are chosen.
        context_s: more for each token of the contexts, and
        request_s: for each further request that the rows belong to.
        host_s: the host's time in a step of one request, searches for drafts left aside, and
        host_request_s: in a step for each further one.
        host_draft_s: more in a step in which one request drafts; with further requests as many
            times more.
    """

    target: CostCurve
    context_s: float = 0.0
    request_s: float = 0.0
    drafters: dict[str, DrafterCost] = field(default_factory=dict[str, DrafterCost])
    host_s: float = 0.0
    host_request_s: float = 0.0
    host_draft_s: float = 0.0

    def booking_s(self, num_requests: int, *, drafts: bool) -> float:
        """The host's time in a step; `drafts`: a request drafts. Without searches for offers."""
        host_s = self.host_s + self.host_request_s * max(0, num_requests - 1)
        return host_s * (1 + self.host_draft_s / self.host_s) if drafts and self.host_s else host_s

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "CostTable":
        """Read a table that `to_json` wrote.

        Raises:
            ConfigError: it is no such table.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            target = _curve(values.pop("target"))
            drafters = {
                name: DrafterCost(_curve(one.pop("passes")), _curve(one.pop("catch_up")), **one)
                for name, one in values.pop("drafters").items()
            }
            return cls(target, drafters=drafters, **values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no table of costs: {error!r}") from error


def _curve(values: dict[str, Any]) -> CostCurve:
    return CostCurve(tuple(values["rows"]), tuple(values["seconds"]), bool(values["has_stairs"]))
