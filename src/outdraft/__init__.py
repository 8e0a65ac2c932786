"""outdraft: LLM inference in which speculative decoding is the normal way to execute."""

from outdraft.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from outdraft.config.speculation import (
    DraftModelConfig,
    NgramConfig,
    SpeculationConfig,
    SuffixConfig,
)
from outdraft.core.outputs import CompletionOutput, RequestOutput
from outdraft.core.sampling import SamplingParams, SpeculationParams
from outdraft.engine.async_engine import AsyncEngine
from outdraft.engine.llm import LLM

__all__ = [
    "LLM",
    "AsyncEngine",
    "CacheConfig",
    "CompletionOutput",
    "DraftModelConfig",
    "EngineConfig",
    "NgramConfig",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "SpeculationConfig",
    "SpeculationParams",
    "SuffixConfig",
]
