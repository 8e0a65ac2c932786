"""What engines of published models plan to take, and what they have taken once they are warm."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Largest resident size of a fresh engine's process, in bytes.
RESIDENT = {"smollm2": 900e6, "coder05": 1e9, "coder15": 1.6e9}
FRESH = """
import sys

import psutil

from outdraft.engine.build import warm_up
from outdraft.engine.llm import LLM

method = {"method": "suffix", "num_speculative_tokens": 24}
llm = LLM(model=sys.argv[1], device="cpu", speculative_config=method, cost_table="roofline")
warm_up(llm.engine)
step, cache = llm.memory.step, llm.memory.block_bytes * llm.memory.num_blocks
logits = step["logits and sampling"] + step["log-probabilities of prompts"]
print(logits, cache, psutil.Process().memory_info().rss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", RESIDENT)
def test_a_fresh_engine_plans_little_for_logits_and_takes_few_pages(
    name: str, published: Callable[[str], Path]
):
    """256 requests of 24 drafts, and as much of a cache as nobody asked for."""
    command = [sys.executable, "-c", FRESH, str(published(name))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    logits, cache, resident = map(int, done.stdout.split()[-3:])
    assert logits < 300e6
    assert cache <= 4 << 30
    assert resident < RESIDENT[name]
