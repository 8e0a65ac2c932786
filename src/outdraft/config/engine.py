"""The engine's configuration: small frozen parts, composed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from outdraft.config.fields import check_fields, check_path, parse_bytes
from outdraft.config.speculation import SpeculationConfig, parse_speculative_config
from outdraft.core.draft import DraftSource
from outdraft.core.errors import ConfigError, did_you_mean
from outdraft.core.weights import QUANTIZATIONS

DTYPES = ("auto", "float32", "float", "bfloat16", "float16", "half", "float64")
MODEL_IMPLS = ("auto", "outdraft", "transformers")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
ACTIVATION_DTYPES = ("auto", "int8", "float")
POLICIES = ("fcfs", "priority")
MOST_RANKS = 256
MOST_TIMEOUT_S = 86_400.0  # infinity is no time that processes can wait
BACKENDS = ("mp", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Memory and blocks of the KV cache.

    Attributes:
        block_size: tokens per block.
        kv_cache_memory_bytes: None: what gpu_memory_utilization leaves.
        gpu_memory_utilization: share of the device's memory for weights, buffers and the cache
            together; on a CPU of the RAM, within the limit of a container. None: 0.9 on a GPU, 0.5
            on a CPU, and no more than that share of what is free; on a CPU the cache then has at
            most 4 GiB.
        num_blocks: overrides the memory settings.
    """

    block_size: Annotated[int, 1] = 16
    kv_cache_memory_bytes: Annotated[int | None, 1] = None
    gpu_memory_utilization: Annotated[float | None, 0, 1] = None
    num_blocks: Annotated[int | None, 1] = None
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.gpu_memory_utilization == 0:
            raise ConfigError("gpu_memory_utilization must be above 0")

    @property
    def has_size(self) -> bool:
        """True if a size of the cache is given, in any unit."""
        asked = self.num_blocks, self.kv_cache_memory_bytes, self.gpu_memory_utilization
        return any(one is not None for one in asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of requests and rows."""

    max_num_seqs: Annotated[int, 1] = 64  # running requests
    # rows of one step: prompt chunks, roots and drafts
    max_num_batched_tokens: Annotated[int, 1] = 2048
    max_waiting: Annotated[int, 1] = 4096  # queued requests
    scheduling_policy: Annotated[str, POLICIES] = "fcfs"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running request needs one row a step"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The ranks of an engine: processes that have a part of the target each.

    How many ranks share a drafter is said with the drafter, as `draft_tensor_parallel_size`.

    Attributes:
        tensor_parallel_size: ranks; 1: the engine's own process computes all.
        distributed_executor_backend: who starts the other ranks: "mp": this machine; "ray": a Ray
            cluster, on any of its machines.
        rank_timeout_s: seconds that one rank waits for another within a step; then that one hangs.
            A server waits as long for an engine's process that was stopped.
        check_ranks: compare on every rank, in each step, the plans and the choices of all ranks.
            Costs a few small messages and the overlap of steps; to find faults with.
    """

    tensor_parallel_size: Annotated[int, 1, MOST_RANKS] = 1
    distributed_executor_backend: Annotated[str, BACKENDS] = "mp"
    rank_timeout_s: Annotated[float, 0.1, MOST_TIMEOUT_S] = 10.0
    check_ranks: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.distributed_executor_backend == "ray" and self.tensor_parallel_size == 1:
            raise ConfigError(
                "distributed_executor_backend ray needs tensor_parallel_size above 1: there is no "
                "other rank to start"
            )

    @property
    def has_ranks(self) -> bool:
        """True if other processes compute, too."""
        return self.tensor_parallel_size > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine needs to start.

    Attributes:
        model: directory of a Hugging Face checkpoint, or its name on the hub.
        dtype: of weights, activations and KV; "auto": the checkpoint's own on a GPU; on a CPU
            bfloat16 for a checkpoint of bfloat16, where the processor multiplies that, else
            float32, with the weights kept in bfloat16 where that holds all of them exactly.
            half and float are other names of float16 and float32.
        revision: branch, tag or commit of a model of the hub.
        load_format: "dummy": random weights, of the shapes that config.json says; else safetensors.
        model_impl: what computes the target's network: "outdraft", "transformers" (the library), or
            "auto": this engine where it has the family, else the library.
        generation_config: whose sampling parameters a request has that leaves them open: "auto":
            the model's generation_config.json, "vllm": none, else the directory of another one.
        enforce_eager: on a GPU, neither passes nor drafts nor their verification become graphs.
        max_model_len: longest prompt + output in tokens; None: what the model allows.
        seed: of requests that bring no seed of their own.
        kernels: "auto": the fastest for the machine; "reference": the readable ones; or an
            instruction set of the CPU, such as "x86-64-v3".
        cost_table: what steps are taken to cost, as far as speculation depends on it: "auto":
            measured when the engine starts, once for each machine and model; "roofline": what
            bytes and operations say; or a file with a table, as `CostTable.to_json` writes it.
        quantization: of the target's weights, which changes what it says: int8, int4, or int4 with
            -g32 (a scale for every 32 inputs, not 128), -zero (zero points) or -g32-zero.
        activation_dtype: what rows become on a CPU that meet blocks of GGUF files or codes of 4
            bits: "float": integers of 16 bits, which lose nothing of bfloat16; "auto": of 8 bits
            where there are compiled kernels, a scale for each block, as in llama.cpp; "int8": the
            same, and an error where no weight is such.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    load_format: Annotated[str, LOAD_FORMATS] = "auto"
    model_impl: Annotated[str, MODEL_IMPLS] = "auto"
    generation_config: str = "auto"
    enforce_eager: bool = False
    dtype: Annotated[str, DTYPES] = "auto"
    device: str = "auto"
    max_model_len: Annotated[int | None, 2] = None
    seed: Annotated[int, 0] = 0
    kernels: str = "auto"
    cost_table: str = "auto"
    quantization: Annotated[str | None, QUANTIZATIONS] = None
    activation_dtype: Annotated[str, ACTIVATION_DTYPES] = "auto"
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        check_path("model", self.model)
        if self.tokenizer is not None:
            check_path("tokenizer", self.tokenizer)
        check_fields(self)
        self._check_ranks()

    @property
    def draft_tensor_parallel_size(self) -> int:
        """Ranks of each draft group: those that share one drafter, and the requests it is for."""
        network = self.speculation.network
        return network.draft_tensor_parallel_size if network is not None else 1

    @classmethod
    def from_options(
        cls, *, speculative_config: Mapping[str, Any] | None = None, **options: Any
    ) -> "EngineConfig":
        """A configuration from flat keyword options, as `LLM` and the command line take them.

        Sizes may be texts such as "256Mi".

        Raises:
            ConfigError: an unknown option (with the closest known one) or a wrong value.
        """
        kinds = {"cache": CacheConfig, "scheduler": SchedulerConfig, "parallel": ParallelConfig}
        owner = {f.name: part for part, kind in kinds.items() for f in fields(kind)}
        own = {f.name for f in fields(cls)} - {*kinds, "speculation"}
        chosen: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {part: {} for part in kinds}
        for name, value in options.items():
            if name not in own and name not in owner:
                known = {*own, *owner, "speculative_config"}
                raise ConfigError(f"unknown option {name!r}: {did_you_mean(name, known)}")
            if name == "kv_cache_memory_bytes" and isinstance(value, str):
                value = parse_bytes(value)
            values = chosen if name in own else parts[owner[name]]
            values[name] = value
        chosen |= {part: kind(**parts[part]) for part, kind in kinds.items()}
        return cls(**chosen, speculation=parse_speculative_config(speculative_config))

    def _check_ranks(self) -> None:
        size, draft_size = self.parallel.tensor_parallel_size, self.draft_tensor_parallel_size
        if size % draft_size:
            allowed = ", ".join(str(one) for one in range(1, size + 1) if size % one == 0)
            raise ConfigError(
                f"draft_tensor_parallel_size must divide tensor_parallel_size ({size}), so it must "
                f"be one of {allowed}, got {draft_size}"
            )
        network = self.speculation.network
        if self.parallel.has_ranks and network is not None and network.source is DraftSource.SELF:
            raise ConfigError(
                "method 'self' drafts in the target's own KV cache, which tensor_parallel_size="
                f"{size} divides: it needs tensor_parallel_size=1, or another method"
            )
        if self.parallel.has_ranks and ":" in self.device:
            raise ConfigError(
                f"device must be auto, cpu or cuda with tensor_parallel_size={size}, as each rank "
                f"has a GPU of its own; got {self.device!r}"
            )
