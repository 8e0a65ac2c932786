"""Flags that several commands share, each defined once: a field here is a flag of the command.

Flags that are not given are not passed on, so every default has one home, the dataclass it is for.
"""

import functools
import inspect
import json
import tomllib
from collections.abc import Callable
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from outdraft import assets
from outdraft.config.checks import check_whole
from outdraft.config.engine import DTYPES, LOAD_FORMATS, MODEL_IMPLS, POLICIES, EngineConfig
from outdraft.config.flags import flag
from outdraft.core.errors import ConfigError, did_you_mean
from outdraft.core.sampling import SamplingParams
from outdraft.core.weights import QUANTIZATIONS

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine is started with; names as in vLLM."""

    tokenizer: str | None = flag("Directory or hub name; default: the model's own.")
    revision: str | None = flag("Branch, tag or commit of a model of the hub.")
    load_format: str | None = flag(
        f"One of {', '.join(LOAD_FORMATS)}; dummy: random weights, without a download."
    )
    model_impl: str | None = flag(
        f"What computes the target's network, one of {', '.join(MODEL_IMPLS)}; auto (the default): "
        "outdraft where it has the family, else the transformers library."
    )
    generation_config: str | None = flag(
        "Where sampling parameters come from that nobody gives: auto (the model's "
        "generation_config.json, the default), vllm (nowhere), or a directory."
    )
    dtype: str | None = flag(f"One of {', '.join(DTYPES)}.")
    device: str | None = flag("auto, cpu or cuda.")
    max_model_len: int | None = flag("Longest prompt + output, in tokens.")
    gpu_memory_utilization: float | None = flag(
        "Share of the device's memory for weights, buffers and the KV cache; on a CPU of the RAM "
        "that a container may have. Default: 0.9 on a GPU, 0.5 on a CPU, and no more than that "
        "share of what is free; on a CPU the KV cache then has at most 4 GiB."
    )
    kv_cache_memory_bytes: str | None = flag(
        "For the KV cache of target and drafter: 268435456, 256Mi, 1G.",
        "--kv-cache-memory-bytes",
        "--kv-cache-memory",
    )
    block_size: int | None = flag("Tokens of a KV block.")
    enable_prefix_caching: bool | None = flag("Keep the KV blocks of earlier prompts.")
    kernels: str | None = flag(
        "auto: the fastest; reference: the readable ones; or an instruction set of the CPU, such "
        "as x86-64-v3."
    )
    quantization: str | None = flag(
        "Bits of the target's weights, which change what it says: one of "
        f"{', '.join(QUANTIZATIONS)}."
    )
    activation_dtype: str | None = flag(
        "What rows become on a CPU that meet weights of a GGUF file or codes of 4 bits: float; "
        "auto (integers of 8 bits, faster, as in llama.cpp); or int8, the same, else an error."
    )
    cost_table: str | None = flag(
        "What steps cost: auto (measured at the first start, and kept), roofline (from bytes and "
        "operations), or a file."
    )
    enforce_eager: bool | None = flag("On a GPU, nothing becomes a CUDA graph.", "--enforce-eager")
    tensor_parallel_size: int | None = flag(
        "Processes (ranks) that compute the target together, each with a part of its weights.",
        "--tensor-parallel-size",
        "-tp",
    )
    distributed_executor_backend: str | None = flag(
        "Who starts the other ranks: mp (this machine, the default) or ray (a Ray cluster, on any "
        "of its machines)."
    )
    rank_timeout_s: float | None = flag(
        "Seconds that ranks wait for each other in a step, until one of them counts as hung; and "
        "that a server waits for an engine whose process was stopped.",
        "--rank-timeout",
    )
    check_ranks: bool | None = flag(
        "Compare in each step what the ranks were told and what they chose.", "--check-ranks"
    )
    seed: int | None = flag("For everything random.")
    speculative_config: str | None = flag(
        "JSON with vLLM's keys, or null for plain decoding. The embedded model brings the "
        "networks of draft_model, eagle3, medusa, mlp_speculator and dspark. Default: with it, "
        "its drafter combined with suffix and n-gram lookup; else plain decoding, or suffix "
        "lookup in a server."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """How requests share the engine; names as in vLLM where it has one."""

    max_num_seqs: int | None = flag("Requests that run together.")
    max_num_batched_tokens: int | None = flag(
        "Rows of one step: prompts, newest tokens and drafts."
    )
    max_waiting: int | None = flag("Requests that may queue; more are refused with 429.")
    policy: str | None = flag(f"One of {', '.join(POLICIES)}.", "--scheduling-policy")
    speculative_disable_queue_size: int | None = flag(
        "No drafts while more requests than this run."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen; names as in vLLM."""

    max_tokens: int = flag("Most tokens to generate.", default=DEFAULT_MAX_TOKENS)
    min_tokens: int | None = flag("Tokens before it may end.")
    temperature: float | None = flag("0 is greedy.")
    top_p: float | None = flag()
    top_k: int | None = flag()
    min_p: float | None = flag()
    presence_penalty: float | None = flag()
    frequency_penalty: float | None = flag()
    repetition_penalty: float | None = flag()
    stop: list[str] | None = flag("End before this text; repeatable.")
    ignore_eos: bool = flag("Go on behind the end.", "--ignore-eos", default=False)


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
                annotation=_in_panel(f, group),
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
    return _config(model, _given(options) | {"max_num_seqs": 1}, without_flag=None)


def serving_config(
    model: str | None, options: EngineOptions, scheduling: SchedulerOptions
) -> EngineConfig:
    """The configuration of a server; else as `engine_config`."""
    given = _given(options) | _given(scheduling)
    return _config(model, given, without_flag={"method": "suffix"})


def _config(
    model: str | None, given: dict[str, Any], without_flag: dict[str, Any] | None
) -> EngineConfig:
    """`without_flag`: the speculative_config of a model that is named."""
    speculation = {"method": "combined"} if model is None else without_flag
    if (text := given.pop("speculative_config", None)) is not None:
        speculation = parse_json_object(text)
    if model is None and speculation is not None:
        speculation = with_embedded_network(speculation)
    if (queue_size := given.pop("speculative_disable_queue_size", None)) is not None:
        if speculation is None:
            raise ConfigError("--speculative-disable-queue-size has no meaning without speculation")
        check_whole("--speculative-disable-queue-size", queue_size, 1)
        if speculation.get("disable_by_batch_size", queue_size) not in (None, queue_size):
            raise ConfigError(
                "--speculative-disable-queue-size and disable_by_batch_size of the "
                "--speculative-config are the same limit: give one of them"
            )
        speculation = speculation | {"disable_by_batch_size": queue_size}
    target = str(assets.target_path()) if model is None else model
    return EngineConfig.from_options(model=target, speculative_config=speculation, **given)


def sampling_params(
    options: SamplingOptions, defaults: SamplingParams | None = None
) -> SamplingParams:
    """What the flags say; what they leave open is as in `defaults`.

    Raises:
        RequestError: a value is out of its range.
    """
    return replace(defaults or SamplingParams(), **_given(options))


def json_object(text: str, name: str, what: str = "a JSON object") -> dict[str, Any]:
    """The value of a flag.

    Raises:
        ConfigError: it is none; `what` it must be is said then.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be {what}, got {text}")
    return value


def parse_json_object(text: str) -> dict[str, Any] | None:
    """The value of --speculative-config."""
    if text.strip() == "null":
        return None
    return json_object(text, "--speculative-config", "a JSON object or null")


def _in_panel(one: Field[Any], group: type) -> Any:
    """The annotation of a flag, which help lists under the name of its group."""
    settings = dict(one.metadata)
    settings["rich_help_panel"] = group.__name__.removesuffix("Options").removesuffix("Plan")
    return Annotated[one.type, typer.Option(*settings.pop("spellings"), **settings)]


def _given(options: EngineOptions | SchedulerOptions | SamplingOptions) -> dict[str, Any]:
    values = {f.name: getattr(options, f.name) for f in fields(options)}
    return {name: value for name, value in values.items() if value not in (None, [])}


def with_embedded_network(values: dict[str, Any]) -> dict[str, Any]:
    """A speculative_config for the embedded target, its network named where it names none.

    The sources of a combination are completed one by one.

    Raises:
        ConfigError: this installation came without the network.
    """
    if isinstance(sources := values.get("sources"), list):
        listed: list[Any] = sources
        completed = [with_embedded_network(one) if isinstance(one, dict) else one for one in listed]
        return {**values, "sources": completed}
    method = values.get("method")
    if values.get("model") is not None:
        return values
    if method in ("draft_model", "combined"):
        return {**values, "model": str(assets.drafter_path())}
    if method in assets.HEADS:
        return {**values, "model": str(assets.head_path(method))}
    return values


def read_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of a command's flags; for the callback of --config.

    Keys are names of flags without the leading dashes. `model` is the argument of that name, and a
    table stands for a flag that takes JSON. A repeatable flag takes a list, or one value.

    Raises:
        ConfigError: the file is no TOML, a key is no flag, or a flag that takes a value gets true
            or false, which would count as 1 or 0.
    """
    if path is None:
        return None
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    flags = {
        spelling.lstrip("-").replace("_", "-"): parameter
        for parameter in context.command.params
        for spelling in parameter.opts
        if parameter.name not in ("config", "help")
    }
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        one = flags.get(key.replace("_", "-"))
        if one is None:
            raise ConfigError(f"unknown key {key!r} in {path}: {did_you_mean(key, flags)}")
        if getattr(one, "multiple", False) and not isinstance(value, list):
            value = [value]
        given: list[Any] = value if isinstance(value, list) else [value]
        if any(isinstance(each, bool) for each in given) and not getattr(one, "is_flag", False):
            raise ConfigError(f"{key!r} in {path} takes a value, not true or false")
        assert one.name is not None
        defaults[one.name] = json.dumps(value) if isinstance(value, dict) else value
    context.default_map = defaults
    return path
