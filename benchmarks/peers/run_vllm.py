"""vLLM for CPUs: its engine in this process, compiled by torch; the driver preloads libiomp5."""

import copy
import os

from protocol import Ask, Grown, Spec, run_steps, serve


def load(spec: Spec):
    environ = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(spec.threads))),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_AOT_COMPILE": "0",  # what it keeps, it cannot load again
    }
    os.environ |= environ
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = {
        "dtype": "bfloat16",
        "max_model_len": spec.max_length,
        "max_num_seqs": spec.max_requests,
        "max_num_batched_tokens": max(2048, spec.max_length),
        "enable_prefix_caching": False,
        "speculative_config": speculation(spec),
        "disable_log_stats": True,
        **spec.options,
    }
    # A copy: vLLM writes into the dict of its speculation.
    kept = environ | copy.deepcopy(arguments)
    engine = LLMEngine.from_engine_args(EngineArgs(model=spec.target, **arguments))
    scheduler = engine.engine_core.engine_core.scheduler

    def run(ask: Ask):
        if scheduler.dynamic_sd_lookup is not None:
            scheduler.dynamic_sd_lookup = [ask.depth] * (spec.max_requests + 1)
        params = SamplingParams(
            temperature=0, max_tokens=ask.new_tokens, ignore_eos=True, detokenize=False
        )
        params.output_kind = RequestOutputKind.DELTA

        def step() -> Grown:
            for output in engine.step():
                if output.outputs[0].token_ids:
                    yield int(output.request_id), list(output.outputs[0].token_ids)

        def add(number: int, prompt: list[int]) -> None:
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)

        return run_steps(ask, add, step)

    return run, kept


def speculation(spec: Spec):
    """With the table of drafts by batch that `run` writes, so that depths need no further load."""
    if spec.method == "plain":
        return None
    common = {"method": spec.method, "num_speculative_tokens": spec.max_depth}
    common["num_speculative_tokens_per_batch_size"] = [(1, spec.max_requests, spec.max_depth)]
    if spec.method == "draft_model":
        return common | {"model": spec.drafter, "max_model_len": spec.max_length}
    return common | {"prompt_lookup_min": 2, "prompt_lookup_max": 4}


if __name__ == "__main__":
    serve(load, ["vllm-cpu", "torch", "transformers"], [])
