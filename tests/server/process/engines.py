"""Engine processes over the tiny pair, and the offline engine they must agree with."""

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import psutil

from outdraft.config.engine import EngineConfig
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM
from outdraft.server.client import EngineProcess, Update
from outdraft.server.process_client import Supervisor
from tests.cli.pair import pair

PROMPTS = ("def add(left,", "return right -", "def subtract(", "left + right", "def")


def config(**options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "num_blocks": 512,
        "speculative_config": {
            "method": "combined",
            "model": str(pair().drafter),
            # The same tokens whatever was drafted: streams can be compared at any temperature.
            "rejection_sample_method": "drafter_invariant",
            "control": "fixed",  # and so are the steps
        },
    }
    return EngineConfig.from_options(model=str(pair().target), **defaults | options)


@cache
def offline() -> LLM:
    return LLM.from_config(config())


def complete(prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """What the offline engine answers."""
    return offline().generate(prompts, params, use_tqdm=False)


def supervisor(chosen: EngineConfig, *, restarts: bool = False) -> Supervisor:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}

    def launch() -> EngineProcess:
        return EngineProcess(chosen, environ, "WARNING")

    return Supervisor(launch, lambda loading: None, restarts=restarts)


async def stream(
    client: Supervisor, request_id: str, prompt: str, params: SamplingParams
) -> list[Update]:
    encoded = client.inputs.encoded(prompt)
    return [update async for update in client.generate(request_id, encoded, params)]


def processes(parent: int) -> list[int]:
    """Engine processes that a process has started."""
    children = psutil.Process(parent).children()
    return [c.pid for c in children if "outdraft.server.core_process" in c.cmdline()]


def ranks_of(parent: int) -> list[psutil.Process]:
    """Processes of ranks that a process has started."""
    children = psutil.Process(parent).children()
    return [one for one in children if "outdraft.ranks.worker" in one.cmdline()]
