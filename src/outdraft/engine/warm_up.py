"""What the first requests would otherwise wait for: kernels to compile, pages to touch."""

from outdraft.core.sampling import SamplingParams
from outdraft.engine.engine import Engine

PROMPT_TOKENS = 4
NUM_STEPS = 4  # the prompt, then some with drafts


def warm_up(engine: Engine) -> None:
    """Run a greedy and a sampled request for a few steps. Nothing is learned from them.

    The engine must be idle.
    """
    size = min(PROMPT_TOKENS, engine.inputs.max_model_len - 1)
    prompt = [token_id % engine.inputs.vocab_size for token_id in range(size)]
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            temperature=temperature, max_tokens=None, ignore_eos=True, detokenize=False
        )
        engine.add_request("warm-up", prompt, params)
        for _ in range(NUM_STEPS):
            engine.step()
        engine.abort("warm-up")
