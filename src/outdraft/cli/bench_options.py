"""Flags of the load benchmarks, and what they mean."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from outdraft.cli.options import json_object
from outdraft.config.benchmarks import TrafficPlan
from outdraft.config.fields import check_whole, flag
from outdraft.core.errors import ConfigError

if TYPE_CHECKING:
    from outdraft.bench.client import Endpoint

MAX_SECONDS = "For the whole measurement; what is not done then has failed."
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """The server that is asked; names as in vLLM."""

    PANEL: ClassVar = "Server"  # of help
    base_url: str | None = flag("Default: http://HOST:PORT.")
    host: str = flag(default="127.0.0.1")
    port: int = flag(default=8000)
    endpoint: str = flag("/v1/completions or /v1/chat/completions.", default="/v1/completions")
    model: str | None = flag("Default: the server's first one.")
    header: list[str] | None = flag("Sent along; repeatable.", metavar="KEY=VALUE")
    temperature: float | None = flag("0 is greedy; default: the server's own.")
    ignore_eos: bool = flag(
        "Go on after the end; random prompts always do.", "--ignore-eos", default=False
    )
    extra_body: str | None = flag(
        'JSON object of more fields: \'{"speculation": {"enabled": false}}\'.'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthOptions:
    """Length of a load test; names as in vLLM."""

    num_prompts: int = flag("Prompts of each run.", default=100, min=1)
    sweep: str | None = flag("A run for each concurrency, and a plot.", metavar="1,2,4")
    max_seconds: float = flag(MAX_SECONDS, default=600, min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOptions:
    """Numbers and files that are kept; names as in vLLM."""

    percentile_metrics: str = flag(
        "Some of ttft, tpot, itl, e2el, client_queue_time.", default="ttft,tpot,itl,e2el"
    )
    metric_percentiles: str = flag("As in 50,90,99.", default="99")
    save_result: bool = flag("As JSON.", "--save-result", default=False)
    save_detailed: bool = flag(
        "With every request's times and text.", "--save-detailed", default=False
    )
    result_dir: Path = flag(default=Path())
    result_filename: str | None = flag("Default: made of rate, model and date.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Measurement of an engine of this process; names as in vLLM."""

    temperature: float = flag(default=0.0)
    disable_detokenize: bool = flag(
        "Make no text of the tokens.", "--disable-detokenize", default=False
    )
    output_json: Path | None = flag("File for the result.")
    max_seconds: float = flag(MAX_SECONDS, default=600, min=1)


def endpoint_of(options: EndpointOptions, *, ignores_eos: bool) -> "Endpoint":
    """Make the endpoint that requests go to, with the fields that all of them carry."""
    from outdraft.bench.client import Endpoint

    body: dict[str, Any] = {}
    if options.temperature is not None:
        body["temperature"] = options.temperature
    if options.ignore_eos or ignores_eos:
        body["ignore_eos"] = True
    if options.extra_body is not None:
        body |= json_object(options.extra_body, "--extra-body")
    pairs = [text.partition("=") for text in options.header or ()]
    if any(not separator for _, separator, _ in pairs):
        raise ConfigError("--header must be KEY=VALUE")
    if not options.endpoint.rstrip("/").endswith("completions"):
        routes = "/v1/completions or /v1/chat/completions"
        raise ConfigError(f"--endpoint must be {routes}, got {options.endpoint!r}")
    return Endpoint(
        base_url=(options.base_url or f"http://{options.host}:{options.port}").rstrip("/"),
        path=options.endpoint,
        model=options.model or "",
        headers={key.strip(): value.strip() for key, _, value in pairs},
        body=body,
    )


def traffics_of(traffic: TrafficPlan, sweep: str | None) -> list[TrafficPlan]:
    """One, or one for each concurrency of a sweep."""
    if sweep is None:
        return [traffic]
    if traffic.max_concurrency is not None or not math.isinf(traffic.request_rate):
        raise ConfigError(
            "--sweep chooses the concurrency: leave out --max-concurrency and --request-rate"
        )
    levels = numbers(sweep, "--sweep", int)
    return [replace(traffic, max_concurrency=level) for level in levels]


def concurrencies(text: str) -> tuple[int, ...]:
    """The levels of --concurrency."""
    levels = tuple(numbers(text, "--concurrency", int))
    for level in levels:
        check_whole("concurrency", level, 1, 4096)
    return levels


def numbers(text: str, flag: str, kind: Callable[[str], _Number]) -> list[_Number]:
    """The values of a flag such as 1,2,4."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} must be numbers between commas, got {text!r}") from None
