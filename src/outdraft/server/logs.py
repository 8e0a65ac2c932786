"""Lines of the log, for people or as JSON for machines; never any text of a request.

Numbers beside the message are passed as `extra={"fields": {...}}`: JSON lines have them one by one.
"""

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TextIO

from prometheus_client import CollectorRegistry

from outdraft.server.metrics import PREFIX

LOGGERS = ("outdraft", "uvicorn")

_logger = logging.getLogger(__name__)


class LogLevel(StrEnum):
    """Values of --log-level."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def set_up_logging(level: LogLevel, stream: TextIO, *, as_json: bool = False) -> None:
    """Send what we and uvicorn log to a stream.

    uvicorn must not set up its own (`log_config=None`). Other libraries keep the
    handlers they have: what they log is not ours to promise.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(as_json=as_json))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


class LineFormatter(logging.Formatter):
    """One line a record: time, level, message; or all of it as a JSON object.

    Times are UTC, in ISO 8601. A traceback follows on lines of its own, or as "exception".
    """

    converter = time.gmtime

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(
            "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        if not self._as_json:
            return super().format(record)
        entry: dict[str, Any] = {
            "time": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class TrafficLog:
    """A line with rates and acceptance every few seconds, from what the metrics counted.

    `registry`: of one engine or several; read before every line.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._before = _read(registry)

    async def run(self, interval_s: float = 10.0) -> None:
        """Log until cancelled."""
        while True:
            started_s = time.monotonic()
            await asyncio.sleep(interval_s)
            self.log(time.monotonic() - started_s)

    def log(self, elapsed_s: float) -> None:
        """Log the time since the last call, unless nothing happened in it."""
        now = _read(self._registry)
        fields = _traffic(self._before, now, elapsed_s)
        self._before = now
        if fields is not None:
            _logger.info("%s", _sentence(fields), extra={"fields": fields})


# Values by name without the prefix and the value of the first label that is not the engine's, "" if
# there is none.
_Values = dict[tuple[str, str], float]


def _read(registry: CollectorRegistry) -> _Values:
    """Sums over all engines; of a share, the mean."""
    values: _Values = defaultdict(float)
    num_engines = 0
    for family in registry.collect():
        for sample in family.samples:
            if "le" not in sample.labels:
                others = [v for k, v in sample.labels.items() if k not in ("model_name", "replica")]
                name = sample.name.removeprefix(PREFIX)
                values[name, others[0] if others else ""] += sample.value
                num_engines += name == "kv_cache_usage_perc"
    values["kv_cache_usage_perc", ""] /= max(1, num_engines)
    return dict(values)


def _traffic(before: _Values, now: _Values, elapsed_s: float) -> dict[str, Any] | None:
    """The numbers of a line; None if nothing ran and nothing is waiting."""

    def gained(name: str, label: str = "") -> float:
        return now[name, label] - before.get((name, label), 0.0)

    def share(part: str, whole: str, label: str = "") -> float | None:
        total = gained(whole, label)
        return round(gained(part, label) / total, 4) if total else None

    running, waiting = now["num_requests_running", ""], now["num_requests_waiting", ""]
    generated, prompt = gained("generation_tokens_total"), gained("prompt_tokens_total")
    if not (running or waiting or generated or prompt):
        return None
    accepted, drafted = (
        "spec_decode_accepted_tokens_by_source_total",
        "spec_decode_draft_tokens_by_source_total",
    )
    behind = share("spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total")
    rates = {
        source: rate
        for name, source in now
        if name == drafted and (rate := share(accepted, drafted, source)) is not None
    }
    return {
        "prompt_tokens_per_s": round(prompt / elapsed_s, 1),
        "generation_tokens_per_s": round(generated / elapsed_s, 1),
        "num_running": int(running),
        "num_waiting": int(waiting),
        "kv_cache_usage": round(now["kv_cache_usage_perc", ""], 4),
        "prefix_cache_hit_rate": share("prefix_cache_hits_total", "prefix_cache_queries_total"),
        "acceptance_length": None if behind is None else round(1 + behind, 4),
        "acceptance_rate_by_source": rates,
    }


# Parts of a line for people, by their fields.
_PARTS = {
    "prompt_tokens_per_s": "prompt {:.1f} tok/s",
    "generation_tokens_per_s": "generation {:.1f} tok/s",
    "num_running": "running {}",
    "num_waiting": "waiting {}",
    "kv_cache_usage": "KV {:.1%}",
    "prefix_cache_hit_rate": "prefix hits {:.1%}",
    "acceptance_length": "acceptance length {:.2f}",
}


def _sentence(fields: Mapping[str, Any]) -> str:
    """The numbers for people; what there was none of is left out."""
    parts = [_PARTS[name].format(fields[name]) for name in _PARTS if fields[name] is not None]
    rates: Mapping[str, float] = fields["acceptance_rate_by_source"]
    if rates:
        parts.append("accepted " + " ".join(f"{name} {rate:.1%}" for name, rate in rates.items()))
    return ", ".join(parts)
