"""Flags that several commands share, each defined once: a field here is a flag of the command.

Flags that are not given are not passed on, so every default has one home, the dataclass it is for.
"""

import functools
import inspect
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from outdraft import assets
from outdraft.config.engine import EngineConfig
from outdraft.config.fields import check_whole, flag, json_object
from outdraft.core.errors import ConfigError, did_you_mean
from outdraft.core.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 256
FLAG = "--speculative-config"
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Arguments of an engine; names as in vLLM.

    Attributes:
        tokenizer: Directory or hub name; default: the model's own.
        revision: Branch, tag or commit of a model of the hub.
        load_format: One of auto, safetensors, dummy; dummy: random weights, without a download.
        model_impl: What computes the target's network, one of auto, outdraft, transformers; auto
            (the default): outdraft where it has the family, else the transformers library.
        generation_config: Source of sampling parameters that a request leaves open: auto (the
            model's generation_config.json, the default), vllm (nowhere), or a directory.
        dtype: One of auto, float32, float, bfloat16, float16, half, float64.
        device: auto, cpu or cuda.
        max_model_len: Longest prompt + output, in tokens.
        gpu_memory_utilization: Share of the device's memory for weights, buffers and the KV cache;
            on a CPU of the RAM that a container may have. Default: 0.9 on a GPU, 0.5 on a CPU, and
            no more than that share of what is free; on a CPU the KV cache then has at most 4 GiB.
        kv_cache_memory_bytes: For the KV cache of target and drafter: 268435456, 256Mi, 1G.
        block_size: Tokens of a KV block.
        enable_prefix_caching: Keep the KV blocks of earlier prompts.
        kernels: auto: the fastest; reference: the readable ones; or an instruction set of the CPU,
            such as x86-64-v3.
        quantization: Bits of the target's weights, which change what it says: one of int8,
            int8-g128, int8-g32, int4, int4-zero, int4-g32, int4-g32-zero.
        activation_dtype: What rows become on a CPU that meet weights of a GGUF file or codes of 4
            bits: float; auto (integers of 8 bits, faster, as in llama.cpp); or int8, the same, else
            an error.
        cost_table: What steps cost: auto (measured at the first start, and kept), roofline (from
            bytes and operations), or a file.
        enforce_eager: On a GPU, nothing becomes a CUDA graph.
        tensor_parallel_size: Processes (ranks) that compute the target together, each with a part
            of its weights.
        distributed_executor_backend: Who starts the other ranks: mp (this machine, the default) or
            ray (a Ray cluster, on any of its machines).
        rank_timeout_s: Seconds that ranks wait for each other in a step, until one of them counts
            as hung; and that a server waits for an engine whose process was stopped.
        check_ranks: Compare in each step the ranks' plans and their choices.
        seed: For everything random.
        speculative_config: JSON with vLLM's keys, or null for plain decoding. The embedded model
            brings the networks of draft_model, eagle3, medusa, mlp_speculator and dspark. Default:
            with it, its drafter combined with suffix and n-gram lookup; else plain decoding, or
            suffix lookup in a server.
    """

    tokenizer: str | None = None
    revision: str | None = None
    load_format: str | None = None
    model_impl: str | None = None
    generation_config: str | None = None
    dtype: str | None = None
    device: str | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: str | None = flag("--kv-cache-memory-bytes", "--kv-cache-memory")
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    kernels: str | None = None
    quantization: str | None = None
    activation_dtype: str | None = None
    cost_table: str | None = None
    enforce_eager: bool | None = flag("--enforce-eager")
    tensor_parallel_size: int | None = flag("--tensor-parallel-size", "-tp")
    distributed_executor_backend: str | None = None
    rank_timeout_s: float | None = flag("--rank-timeout")
    check_ranks: bool | None = flag("--check-ranks")
    seed: int | None = None
    speculative_config: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Limits of requests that share the engine; names as in vLLM where it has one.

    Attributes:
        max_num_seqs: Requests that run together.
        max_num_batched_tokens: Rows of one step: prompts, newest tokens and drafts.
        max_waiting: Requests that may queue; more are refused with 429.
        scheduling_policy: One of fcfs, priority.
        speculative_disable_queue_size: No drafts while more requests than this run.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_waiting: int | None = None
    scheduling_policy: str | None = None
    speculative_disable_queue_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Choice of tokens; names as in vLLM.

    Attributes:
        max_tokens: Most tokens to generate.
        min_tokens: Tokens before it may end.
        temperature: 0 is greedy.
        stop: End before this text; repeatable.
        ignore_eos: Go on after the end.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: list[str] | None = None
    ignore_eos: bool = flag("--ignore-eos", default=False)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Make the command that typer runs of a function: its docstring says what its flags are;
    sections other than `Args` are panels of help.

    Each parameter that is a dataclass is replaced by its fields, as flags with a panel of help.
    """
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    helps = documented(command)
    for parameter in inspect.signature(command).parameters.values():
        group = parameter.annotation
        if not is_dataclass(group):
            if parameter.name in helps:
                kind, *given = get_args(group) if get_origin(group) is Annotated else (group,)
                info = given[0] if given else typer.Option()
                section, info.help = helps[parameter.name]
                info.rich_help_panel = None if section == "Args" else section
                parameter = parameter.replace(annotation=Annotated[kind, info])
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

    flat.__doc__ = re.split(r"\n\n\w+:\n", inspect.getdoc(command) or "")[0]
    flat.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def engine_config(
    model: str | None, options: EngineOptions, scheduling: SchedulerOptions | None = None
) -> EngineConfig:
    """The configuration of an engine; no model means the embedded pair.

    scheduling: of a server; None: one conversation at a time.

    Raises:
        ConfigError: a value is wrong, or there is no embedded pair.
    """
    given: dict[str, Any] = {"max_num_seqs": 1} if scheduling is None else _given(scheduling)
    given |= _given(options)
    default = None if scheduling is None else {"method": "suffix"}
    if model is None:
        default = {"method": "combined"}
    speculation = speculative_config(given.pop("speculative_config", None), model, default)
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
    """Make sampling parameters of flags; those that are not given are as in `defaults`.

    Raises:
        RequestError: a value is out of its range.
    """
    return replace(defaults or SamplingParams(), **_given(options))


def speculative_config(
    text: str | None, model: str | None, default: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """The value of --speculative-config, see `with_embedded_network`; None: plain decoding.

    Args:
        text: None: the flag is not given, so `default` counts.
        model: None: the embedded one.

    Raises:
        ConfigError: it is no JSON object, or this installation came without the network.
    """
    values = default
    if text is not None:
        is_null = text.strip() == "null"
        values = None if is_null else json_object(text, FLAG, "a JSON object or null")
    return with_embedded_network(values) if model is None and values is not None else values


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


def documented(described: Callable[..., Any]) -> dict[str, tuple[str, str]]:
    """Section and text of each name that the docstring of a class or a function lists."""
    section, found = "", dict[str, tuple[str, str]]()
    entries = r"^(?:(\w+):$| {4}(\w+): (.+(?:\n {8}.+)*))"
    for title, name, text in re.findall(entries, inspect.getdoc(described) or "", re.MULTILINE):
        section = title or section
        if name:
            found[name] = section, " ".join(text.split())
    return found


def _in_panel(one: Field[Any], group: type) -> Any:
    """The annotation of a flag, which help lists under the title of its section in the docstring;
    for `Attributes` that is the name of its group, or its PANEL."""
    section, text = documented(group).get(one.name, ("Attributes", None))
    if section == "Attributes":
        name = group.__name__.removesuffix("Options").removesuffix("Plan")
        section = getattr(group, "PANEL", name)
    settings: dict[str, Any] = {"spellings": (), "help": text, **one.metadata}
    settings["rich_help_panel"] = section
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

    def embedded(method: Any) -> str | None:
        if method in ("draft_model", "combined"):
            return str(assets.drafter_path())
        return str(assets.head_path(method)) if method in assets.HEADS else None

    return with_networks(values, embedded)


def with_networks(values: dict[str, Any], model_of: Callable[[Any], str | None]) -> dict[str, Any]:
    """A speculative_config in which each source that names no model has the one of its method.

    model_of: by method; None: it needs none.
    """
    if isinstance(sources := values.get("sources"), list):
        listed: list[Any] = sources
        named = [with_networks(one, model_of) if isinstance(one, dict) else one for one in listed]
        return {**values, "sources": named}
    if values.get("model") is not None or (model := model_of(values.get("method"))) is None:
        return values
    return {**values, "model": model}


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
