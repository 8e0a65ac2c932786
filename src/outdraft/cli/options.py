"""Flags that several commands share, each defined once: a field here is a flag of the command.

Flags that are not given are not passed on, so every default has one home, the dataclass it is for.
"""

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any

import typer

from outdraft import assets
from outdraft.cli.embedded import with_embedded_network
from outdraft.config.engine import DTYPES, LOAD_FORMATS, POLICIES, EngineConfig
from outdraft.core.errors import ConfigError
from outdraft.core.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine is started with; names as in vLLM."""

    tokenizer: Annotated[
        str | None, typer.Option(help="Directory or hub name; default: the model's own.")
    ] = None
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a model of the hub.")
    ] = None
    load_format: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(LOAD_FORMATS)}; dummy: random weights, without a download."
        ),
    ] = None
    generation_config: Annotated[
        str | None,
        typer.Option(
            help="Where sampling parameters come from that nobody gives: auto (the model's "
            "generation_config.json, the default), vllm (nowhere), or a directory."
        ),
    ] = None
    dtype: Annotated[str | None, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = None
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt + output, in tokens.")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Share of the device's memory for weights, buffers and the KV cache; on a CPU of "
            "the RAM that a container may have. Default: 0.9 on a GPU, 0.5 on a CPU, and no more "
            "than that share of what is free."
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        str | None,
        typer.Option(
            "--kv-cache-memory-bytes",
            "--kv-cache-memory",
            help="For the KV cache of target and drafter: 268435456, 256Mi, 1G.",
        ),
    ] = None
    block_size: Annotated[int | None, typer.Option(help="Tokens of a KV block.")] = None
    enable_prefix_caching: Annotated[
        bool | None, typer.Option(help="Keep the KV blocks of earlier prompts.")
    ] = None
    kernels: Annotated[
        str | None,
        typer.Option(
            help="auto: the fastest; reference: the readable ones; or an instruction set of the "
            "CPU, such as x86-64-v3."
        ),
    ] = None
    enforce_eager: Annotated[
        bool | None,
        typer.Option("--enforce-eager", help="Accepted: steps are never captured as graphs."),
    ] = None
    seed: Annotated[int | None, typer.Option(help="For everything random.")] = None
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help="JSON with vLLM's keys, or null for plain decoding. The embedded model brings the "
            "networks of draft_model, eagle3, medusa and mlp_speculator. Default: with it, its "
            "drafter combined with suffix and n-gram lookup; else plain decoding, or suffix lookup "
            "in a server."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """How requests share the engine; names as in vLLM where it has one."""

    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that run together.")] = None
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Rows of one step: prompts, newest tokens and drafts.")
    ] = None
    max_waiting: Annotated[
        int | None, typer.Option(help="Requests that may queue; more are refused with 429.")
    ] = None
    policy: Annotated[
        str | None, typer.Option("--scheduling-policy", help=f"One of {', '.join(POLICIES)}.")
    ] = None
    speculative_disable_queue_size: Annotated[
        int | None, typer.Option(help="No drafts while more requests than this run.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen; names as in vLLM."""

    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = DEFAULT_MAX_TOKENS
    min_tokens: Annotated[int | None, typer.Option(help="Tokens before it may end.")] = None
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None
    top_p: Annotated[float | None, typer.Option()] = None
    top_k: Annotated[int | None, typer.Option()] = None
    min_p: Annotated[float | None, typer.Option()] = None
    presence_penalty: Annotated[float | None, typer.Option()] = None
    frequency_penalty: Annotated[float | None, typer.Option()] = None
    repetition_penalty: Annotated[float | None, typer.Option()] = None
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the end.")] = False


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass by its fields, as flags with a panel of help."""
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group = parameter.annotation
        if not is_dataclass(group):
            parameters.append(parameter)
            continue
        assert isinstance(group, type)
        groups[parameter.name] = group
        parameters.extend(
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=f.default,
                annotation=_in_panel(f.type, group),
            )
            for f in fields(group)
        )

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        command(**values)

    flat.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def engine_config(model: str | None, options: EngineOptions) -> EngineConfig:
    """The configuration for one conversation at a time; no model means the embedded pair.

    Raises:
        ConfigError: a value is wrong, or there is no embedded pair.
    """
    speculative_config = _speculative_config(model, options, without_flag=None)
    return _config(model, options, speculative_config, {"max_num_seqs": 1})


def serving_config(
    model: str | None, options: EngineOptions, scheduling: SchedulerOptions
) -> EngineConfig:
    """The configuration of a server; no model means the embedded pair.

    Raises:
        ConfigError: as `engine_config`.
    """
    speculative_config = _speculative_config(model, options, without_flag={"method": "suffix"})
    given = _given(scheduling)
    queue_size = given.pop("speculative_disable_queue_size", None)
    if queue_size is not None:
        if speculative_config is None:
            raise ConfigError("--speculative-disable-queue-size has no meaning without speculation")
        speculative_config = speculative_config | {"disable_by_batch_size": queue_size}
    return _config(model, options, speculative_config, given)


def sampling_params(
    options: SamplingOptions, defaults: SamplingParams | None = None
) -> SamplingParams:
    """What the flags say; what they leave open is as in `defaults`.

    Raises:
        RequestError: a value is out of its range.
    """
    return replace(defaults or SamplingParams(), **_given(options))


def parse_json_object(text: str) -> dict[str, Any] | None:
    """The value of --speculative-config."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--speculative-config is not valid JSON: {error}") from None
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"--speculative-config must be a JSON object or null, got {text}")
    return value


def _speculative_config(
    model: str | None, options: EngineOptions, without_flag: dict[str, Any] | None
) -> dict[str, Any] | None:
    """What the flag says; the embedded model brings the networks that its methods need."""
    if options.speculative_config is not None:
        chosen = parse_json_object(options.speculative_config)
    else:
        chosen = {"method": "combined"} if model is None else without_flag
    return with_embedded_network(chosen) if model is None and chosen is not None else chosen


def _config(
    model: str | None,
    options: EngineOptions,
    speculative_config: dict[str, Any] | None,
    scheduling: Mapping[str, Any],
) -> EngineConfig:
    given = _given(options)
    given.pop("speculative_config", None)
    return EngineConfig.from_options(
        model=str(assets.target_path()) if model is None else model,
        speculative_config=speculative_config,
        **scheduling,
        **given,
    )


def _in_panel(annotation: Any, group: type) -> Any:
    """The annotation of a flag, which help lists under the name of its group."""
    option = copy(annotation.__metadata__[0])
    option.rich_help_panel = group.__name__.removesuffix("Options")
    return Annotated[annotation.__origin__, option]


def _given(options: EngineOptions | SchedulerOptions | SamplingOptions) -> dict[str, Any]:
    values = {f.name: getattr(options, f.name) for f in fields(options)}
    return {name: value for name, value in values.items() if value not in (None, [])}
