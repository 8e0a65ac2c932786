"""Requests of a benchmark: their prompts, arrival and repetition; names of flags as in vLLM."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from outdraft.config.fields import check_choice, check_fields, flag, json_object
from outdraft.core.errors import ConfigError

DATASETS = ("embedded", "custom", "sharegpt", "random")
DEFAULT_OUTPUT_LEN = 128
PROBE_LENGTH = 3  # drafts of the fixed lengths that explain what `outdraft tune` finds


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Source of prompts.

    Attributes:
        name: embedded (held-out code), custom (JSONL), sharegpt or random.
        path: custom: a line is {prompt, max_tokens?, prediction?}; sharegpt: JSON.
        input_len: Tokens of a random prompt.
        output_len: Tokens to generate; default: the data's, else 128.
        range_ratio: Random lengths are even over len * (1 - r) to len * (1 + r).
    """

    name: str = flag("--dataset-name", default="embedded")
    path: Path | None = flag("--dataset-path")
    input_len: Annotated[int, 1] = 1024
    output_len: Annotated[int | None, 1] = None
    range_ratio: float = flag("--random-range-ratio", default=0.0)

    def __post_init__(self) -> None:
        check_fields(self)
        check_choice("dataset_name", self.name, DATASETS)
        needs_path = self.name in ("custom", "sharegpt")
        if needs_path != (self.path is not None):
            need = "needs" if needs_path else "takes no"
            raise ConfigError(f"dataset {self.name!r} {need} --dataset-path")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"range_ratio must be in [0, 1), got {self.range_ratio}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The server that is asked; names as in vLLM.

    Attributes:
        base_url: Default: http://HOST:PORT.
        endpoint: /v1/completions or /v1/chat/completions.
        model: Default: the server's first one.
        header: Sent along; repeatable.
        temperature: 0 is greedy; default: the server's own.
        ignore_eos: Go on after the end; random prompts always do.
        extra_body: JSON object of more fields: '{"speculation": {"enabled": false}}'.
    """

    PANEL: ClassVar = "Server"  # of help
    base_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    endpoint: str = "/v1/completions"
    model: str | None = None
    header: list[str] | None = flag(metavar="KEY=VALUE")
    temperature: float | None = None
    ignore_eos: bool = flag("--ignore-eos", default=False)
    extra_body: str | None = None

    def __post_init__(self) -> None:
        if any("=" not in text for text in self.header or ()):
            raise ConfigError("--header must be KEY=VALUE")
        if not self.endpoint.rstrip("/").endswith("completions"):
            routes = "/v1/completions or /v1/chat/completions"
            raise ConfigError(f"--endpoint must be {routes}, got {self.endpoint!r}")
        if self.extra_body is not None:
            json_object(self.extra_body, "--extra-body")

    @property
    def url(self) -> str:
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")

    @property
    def headers(self) -> dict[str, str]:
        pairs = [text.partition("=") for text in self.header or ()]
        return {key.strip(): value.strip() for key, _, value in pairs}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPlan:
    """Arrival of requests.

    Attributes:
        request_rate: Requests a second; inf: all at once.
        burstiness: Shape of the gamma distributed gaps; 1 is a Poisson process.
        max_concurrency: Most requests under way.
        num_warmups: Sent first, not measured.
        seed: For prompts and arrivals.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: Annotated[int | None, 1] = None
    num_warmups: Annotated[int, 0] = 0
    seed: int = flag(default=0, min=0)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.request_rate > 0 or not self.burstiness > 0:  # also for NaN
            raise ConfigError(
                "request_rate and burstiness must be above 0, got "
                f"{self.request_rate} and {self.burstiness}"
            )

    @property
    def is_closed_loop(self) -> bool:
        return math.isinf(self.request_rate) and self.max_concurrency is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPlan:
    """Repetitions of a batch.

    Every iteration has prompts of its own: the memory of earlier answers would draft the same ones
    again, and a user's next batch is another one.
    """

    batch_size: Annotated[int, 1] = 1
    num_iters_warmup: Annotated[int, 0] = 2
    num_iters: Annotated[int, 1] = 10

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def num_requests(self) -> int:
        return self.batch_size * (self.num_iters_warmup + self.num_iters)
