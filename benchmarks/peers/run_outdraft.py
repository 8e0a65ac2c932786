"""outdraft, its steps called in this process."""

import gc
import os

from protocol import Ask, Grown, Spec, run_steps, serve

from outdraft.core.process import prepare_openmp

prepare_openmp(os.environ)

import torch  # noqa: E402

from outdraft import LLM, SamplingParams, assets  # noqa: E402
from outdraft.core.sampling import SpeculationParams  # noqa: E402
from outdraft.engine.assembly import Assembler  # noqa: E402


def load(spec: Spec):
    torch.set_num_threads(spec.threads)
    settings = {
        "device": "cpu",
        "speculative_config": speculation(spec),
        "max_num_seqs": spec.max_requests,
        "max_model_len": spec.max_length,
        "num_blocks": spec.max_requests * (spec.max_length // 16 + 2),
        "enable_prefix_caching": False,
        **spec.options,
    }
    assembler = Assembler(LLM(spec.target, **settings).engine)
    gc.collect()
    gc.freeze()  # as the server's engine process does

    def run(ask: Ask):
        lengths: dict[str, int] = {}
        depth = None if spec.method == "suffix" else ask.depth
        params = SamplingParams(
            temperature=0,
            max_tokens=ask.new_tokens,
            ignore_eos=True,
            detokenize=False,
            speculation=SpeculationParams(num_speculative_tokens=depth),
        )

        def step() -> Grown:
            for output in assembler.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                name, token_ids = output.request_id, output.outputs[0].token_ids
                yield int(name), token_ids[lengths.get(name, 0) :]
                lengths[name] = len(token_ids)

        return run_steps(ask, lambda n, ids: assembler.add_request(str(n), ids, params), step)

    return run, settings


def speculation(spec: Spec):
    """Texts that have ended teach nothing: the same prompts come again in every repeat."""
    forgets = {"suffix_decoding_max_cached_requests": 0}
    if spec.method == "plain":
        return None
    if spec.method == "suffix":
        return {"method": "suffix", **forgets}  # drafts as long as it is sure
    config = {"method": spec.method, "num_speculative_tokens": spec.max_depth}
    if spec.method == "combined":
        return config | {"model": spec.drafter, **forgets}
    config["control"] = "fixed"  # as long as the others' drafts
    if spec.method == "draft_model":
        return config | {"model": spec.drafter}
    if spec.method == "ngram":
        return config
    return config | {"model": str(assets.head_path(spec.method))}


if __name__ == "__main__":
    serve(load, ["outdraft", "torch"], [])
