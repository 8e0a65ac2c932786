"""OpenVINO GenAI: its pipeline of continuous batching, which is also the one that speculates."""

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import Ask, Grown, Spec, run_steps, serve


def load(spec: Spec):
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = spec.max_requests
    scheduler.cache_size = 2  # GB
    scheduler.enable_prefix_caching = False
    # It refuses what the processor has no instructions for.
    precision = "bf16" if "BF16" in capabilities() else "f32"
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": spec.threads,
        **spec.options,
    }
    if spec.method == "draft_model":
        properties["draft_model"] = genai.draft_model(spec.drafter, "CPU", **properties)
    if spec.method == "ngram":
        properties["prompt_lookup"] = True
    pipeline = genai.ContinuousBatchingPipeline(spec.target, scheduler, "CPU", properties)

    def run(ask: Ask):
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = ask.new_tokens, True, False
        if spec.method != "plain":
            config.num_assistant_tokens = ask.depth
        if spec.method == "ngram":
            config.max_ngram_size = 3
        handles = {}

        def add(number: int, prompt: list[int]) -> None:
            ids = ov.Tensor(np.array([prompt], dtype=np.int64))
            handles[number] = pipeline.add_request(number, ids, config)

        def step() -> Grown:
            pipeline.step()
            for number, handle in handles.items():
                if handle.can_read():
                    for output in handle.read().values():
                        yield number, list(output.generated_ids)

        answers = run_steps(ask, add, step)
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return answers

    limits = ("max_num_batched_tokens", "max_num_seqs", "cache_size", "enable_prefix_caching")
    kept = {name: getattr(scheduler, name) for name in limits}
    return run, kept | {name: str(value) for name, value in properties.items()}


def capabilities() -> list[str]:
    """What the processor has instructions for, in OpenVINO's words."""
    return ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


if __name__ == "__main__":
    serve(load, ["openvino", "openvino-genai"], [])
