"""outdraft: LLM inference in which speculative decoding is the normal way to execute.

Names are imported when they are first used: OpenMP's settings must be chosen before anything
imports torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from outdraft.core.process import prepare_openmp

if TYPE_CHECKING:
    from outdraft.config.engine import CacheConfig, EngineConfig, SchedulerConfig
    from outdraft.config.speculation import (
        DraftNetworkConfig,
        NgramConfig,
        SpeculationConfig,
        SuffixConfig,
    )
    from outdraft.core.outputs import CompletionOutput, RequestOutput
    from outdraft.core.sampling import SamplingParams, SpeculationParams
    from outdraft.core.structured_outputs import StructuredOutput, StructuredOutputsParams
    from outdraft.engine.async_engine import AsyncEngine
    from outdraft.engine.inputs import TextPrompt, TokensPrompt
    from outdraft.engine.llm import LLM

__all__ = [
    "LLM",
    "AsyncEngine",
    "CacheConfig",
    "CompletionOutput",
    "DraftNetworkConfig",
    "EngineConfig",
    "NgramConfig",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "SpeculationConfig",
    "SpeculationParams",
    "StructuredOutput",
    "StructuredOutputsParams",
    "SuffixConfig",
    "TextPrompt",
    "TokensPrompt",
]

_HOMES = {
    "config.engine": ("CacheConfig", "EngineConfig", "SchedulerConfig"),
    "config.speculation": (
        "DraftNetworkConfig",
        "NgramConfig",
        "SpeculationConfig",
        "SuffixConfig",
    ),
    "core.outputs": ("CompletionOutput", "RequestOutput"),
    "core.sampling": ("SamplingParams", "SpeculationParams"),
    "core.structured_outputs": ("StructuredOutput", "StructuredOutputsParams"),
    "engine.async_engine": ("AsyncEngine",),
    "engine.llm": ("LLM",),
    "engine.inputs": ("TextPrompt", "TokensPrompt"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            prepare_openmp(os.environ)
            return getattr(import_module(f"outdraft.{home}"), name)
    raise AttributeError(f"module 'outdraft' has no attribute {name!r}")
