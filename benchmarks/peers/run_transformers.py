"""transformers' own generate; a batch is static, all of its prompts having the same length."""

import time
from typing import Any

import torch
from protocol import Answer, Ask, Spec, serve
from transformers import AutoModelForCausalLM


class Streamer:
    """Called with the prompt, then with the tokens of each round."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self._started_s = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        if self.answer is None:
            self.answer = Answer()
        else:
            self.answer.add(value.flatten().tolist(), time.perf_counter() - self._started_s)

    def end(self) -> None:
        pass


def load(spec: Spec):
    torch.set_num_threads(spec.threads)
    target: Any = AutoModelForCausalLM.from_pretrained(spec.target, dtype=torch.bfloat16).eval()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 1, **spec.options}
    drafter: Any = None
    if spec.method == "draft_model":
        drafter = AutoModelForCausalLM.from_pretrained(spec.drafter, dtype=torch.bfloat16).eval()
        drafter.generation_config.num_assistant_tokens_schedule = "constant"
        drafter.generation_config.assistant_confidence_threshold = 0
        options["assistant_model"] = drafter

    @torch.inference_mode()
    def run(ask: Ask) -> list[Answer]:
        if drafter is not None:
            drafter.generation_config.num_assistant_tokens = ask.depth
        if spec.method == "ngram":
            options["prompt_lookup_num_tokens"] = ask.depth
        ids, started_s = torch.tensor(ask.prompts), time.perf_counter()
        streamer = Streamer() if len(ask.prompts) == 1 else None
        whole = target.generate(ids, max_new_tokens=ask.new_tokens, streamer=streamer, **options)
        if streamer is not None:
            assert streamer.answer is not None
            return [streamer.answer]
        elapsed_s = time.perf_counter() - started_s
        rows = whole[:, ids.shape[1] :].tolist()
        return [Answer(token_ids=row, last_s=elapsed_s, rounds=len(row) - 1) for row in rows]

    return run, {"dtype": "bfloat16", "attention": target.config._attn_implementation}


if __name__ == "__main__":
    serve(load, ["transformers", "torch"], [])
