"""`python -m tests.distributed.peak_memory` reads the options of an engine of several ranks, fills
its cache, runs its largest steps, and prints what each rank held at most and what was planned.

A process of its own: what a test held before counts in the peak of its process.
"""

import json
import os
import sys

import psutil

from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM

MAX_TOKENS = 20  # more than a step drafts: what is left of a text bounds its drafts


def main() -> None:
    options, has_all_rules = json.load(sys.stdin)
    llm = LLM(**options)
    num_requests, block_size = options["max_num_seqs"], llm.memory.block_size
    room = llm.memory.num_blocks // num_requests * block_size - MAX_TOKENS
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=MAX_TOKENS, ignore_eos=True)
    if has_all_rules:
        params = SamplingParams(
            temperature=1.0,
            seed=1,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            top_k=50,
            top_p=0.9,
            min_p=0.01,
            presence_penalty=0.2,
            frequency_penalty=0.2,
            repetition_penalty=1.1,
            logit_bias={1: 0.5, 2: -0.5},
            allowed_token_ids=list(range(60)),
            min_tokens=MAX_TOKENS,
            stop_token_ids=[3],
            logprobs=1,
            prompt_logprobs=1,
        )
    vocab_size = llm.models.target.config.vocab_size
    # No two prompts begin alike: each fills blocks of its own.
    prompts = [[(7 * i + j) % vocab_size for j in range(room)] for i in range(num_requests)]
    llm.generate(prompts, params, use_tqdm=False)
    children = psutil.Process().children()
    ranks = [one.pid for one in children if "outdraft.ranks.worker" in one.cmdline()]
    taken = [peak_bytes(pid) for pid in (os.getpid(), *ranks)]
    planned = [rank.total for rank in llm.memory.ranks]
    llm.close()
    print(json.dumps({"taken": taken, "planned": planned}))


def peak_bytes(pid: int) -> int:
    """Most memory of its own that a process has had, as Linux counts.

    What it has mapped of files counts there too. At a peak behind all loading those are libraries,
    and how much of them is in memory hangs on what else the machine does.
    """
    with open(f"/proc/{pid}/status") as status:
        sizes = dict(line.split(":") for line in status if line.startswith(("VmHWM:", "RssFile:")))
    peak, of_files = (int(sizes[name].split()[0]) << 10 for name in ("VmHWM", "RssFile"))
    return peak - of_files


if __name__ == "__main__":
    main()
