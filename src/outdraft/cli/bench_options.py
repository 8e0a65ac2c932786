"""Flags of the load benchmarks, and what they mean."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from outdraft.core.errors import ConfigError

if TYPE_CHECKING:
    from outdraft.bench.client import Endpoint
    from outdraft.bench.serve import Traffic
    from outdraft.bench.workloads import Dataset

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """What is asked; names as in vLLM."""

    dataset_name: Annotated[
        str, typer.Option(help="embedded (held-out code), custom (JSONL), sharegpt or random.")
    ] = "embedded"
    dataset_path: Annotated[
        Path | None,
        typer.Option(help="custom: a line is {prompt, max_tokens?, prediction?}; sharegpt: JSON."),
    ] = None
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a random prompt.")] = 1024
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens to generate; default: the data's, else 128.")
    ] = None
    random_range_ratio: Annotated[
        float, typer.Option(help="Random lengths are even over len * (1 - r) to len * (1 + r).")
    ] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Who is asked; names as in vLLM."""

    base_url: Annotated[str | None, typer.Option(help="Default: http://HOST:PORT.")] = None
    host: Annotated[str, typer.Option()] = "127.0.0.1"
    port: Annotated[int, typer.Option()] = 8000
    endpoint: Annotated[str, typer.Option(help="/v1/completions or /v1/chat/completions.")] = (
        "/v1/completions"
    )
    model: Annotated[str | None, typer.Option(help="Default: the server's first one.")] = None
    header: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Sent along; repeatable.")
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; default: the server's own.")
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on behind the end; random prompts always do.")
    ] = False
    extra_body: Annotated[
        str | None,
        typer.Option(help='JSON object of more fields: \'{"speculation": {"enabled": false}}\'.'),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions:
    """How requests arrive; names as in vLLM."""

    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of each run.")] = 100
    request_rate: Annotated[float, typer.Option(help="Requests a second; inf: all at once.")] = (
        math.inf
    )
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma distributed gaps; 1 is a Poisson process.")
    ] = 1.0
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests under way.")] = (
        None
    )
    sweep: Annotated[
        str | None, typer.Option(metavar="1,2,4", help="A run for each concurrency, and a plot.")
    ] = None
    num_warmups: Annotated[int, typer.Option(min=0, help="Sent first, not measured.")] = 0
    seed: Annotated[int, typer.Option(min=0, help="For prompts and arrivals.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOptions:
    """What is kept; names as in vLLM."""

    percentile_metrics: Annotated[
        str, typer.Option(help="Some of ttft, tpot, itl, e2el, client_queue_time.")
    ] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, typer.Option(help="As in 50,90,99.")] = "99"
    save_result: Annotated[bool, typer.Option("--save-result", help="As JSON.")] = False
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With every request's times and text.")
    ] = False
    result_dir: Annotated[Path, typer.Option()] = Path()
    result_filename: Annotated[
        str | None, typer.Option(help="Default: made of rate, model and date.")
    ] = None


def dataset_of(options: DatasetOptions) -> "Dataset":
    """Raises ConfigError if the options contradict each other."""
    from outdraft.bench.workloads import Dataset

    return Dataset(
        name=options.dataset_name,
        path=options.dataset_path,
        input_len=options.input_len,
        output_len=options.output_len,
        range_ratio=options.random_range_ratio,
    )


def endpoint_of(options: ServerOptions, *, ignores_eos: bool) -> "Endpoint":
    """Where requests go, and the fields that all of them carry."""
    from outdraft.bench.client import Endpoint

    body: dict[str, Any] = {}
    if options.temperature is not None:
        body["temperature"] = options.temperature
    if options.ignore_eos or ignores_eos:
        body["ignore_eos"] = True
    if options.extra_body is not None:
        body |= _json_object(options.extra_body)
    pairs = [text.partition("=") for text in options.header or ()]
    if any(not separator for _, separator, _ in pairs):
        raise ConfigError("--header must be KEY=VALUE")
    return Endpoint(
        base_url=(options.base_url or f"http://{options.host}:{options.port}").rstrip("/"),
        path=options.endpoint,
        model=options.model or "",
        headers={key.strip(): value.strip() for key, _, value in pairs},
        body=body,
    )


def traffics_of(options: TrafficOptions) -> "list[Traffic]":
    """One, or one for each concurrency of a sweep."""
    from outdraft.bench.serve import Traffic

    traffic = Traffic(
        request_rate=options.request_rate,
        burstiness=options.burstiness,
        max_concurrency=options.max_concurrency,
        num_warmups=options.num_warmups,
        seed=options.seed,
    )
    if options.sweep is None:
        return [traffic]
    if options.max_concurrency is not None or not math.isinf(options.request_rate):
        raise ConfigError("--sweep chooses the concurrency: leave out the other two")
    levels = numbers(options.sweep, "--sweep", int)
    return [replace(traffic, max_concurrency=level) for level in levels]


def numbers(text: str, flag: str, kind: Callable[[str], _Number]) -> list[_Number]:
    """The values of a flag such as 1,2,4."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} must be numbers between commas, got {text!r}") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {text}")
    return value
