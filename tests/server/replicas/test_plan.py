"""What one replica of several is started with."""

from dataclasses import replace

from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM
from outdraft.server.replicas.router import config_of_replica
from tests.server.process.engines import config


def test_replicas_draw_noise_of_their_own():
    asked = config()
    first, second = (config_of_replica(asked, name) for name in ("a", "b"))
    assert first == config_of_replica(asked, "a")
    assert first != config_of_replica(replace(asked, seed=1), "a")
    assert replace(first, seed=0) == replace(second, seed=0) == replace(asked, seed=0)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    texts = [
        LLM.from_config(one).generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
        for one in (first, second)
    ]
    assert texts[0] != texts[1]
