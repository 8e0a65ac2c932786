"""A GGUF file behind the whole server, against the offline engine."""

from pathlib import Path

import httpx
import pytest
from gguf import GGMLQuantizationType as Kind

from outdraft import LLM, SamplingParams
from tests.models.checkpoints import llama, randomised
from tests.models.quantized.gguf_files import SIZES, byte_level, write_gguf
from tests.server.served import serving

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("end_to_end")]

TEXTS = ("a tale of two cities", "the cities of the plain", "tall tales, tall cities")


def test_the_server_answers_as_the_engine_does_alone(tmp_path: Path) -> None:
    """Prompt and answer as text and as ids; the vocabulary is that of the file."""
    tokenizer, vocabulary = byte_level(TEXTS)
    sizes = SIZES | {"vocab_size": len(vocabulary["tokens"])}
    path = tmp_path / "model.gguf"
    write_gguf(randomised(llama(**sizes)), path, lambda name: Kind.Q8_0, vocabulary)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options = {"dtype": "float32", "device": "cpu", "num_blocks": 32}
    [want] = LLM(str(path), **options).generate([TEXTS[0]], params, use_tqdm=False)
    with serving(tmp_path, str(path), "--dtype", "float32", "--kv-cache-memory", "64Mi") as on:
        body = {"prompt": TEXTS[0], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        response = httpx.post(
            on.url + "/v1/completions", json=body | {"return_token_ids": True}, timeout=60
        )
    [choice] = response.json()["choices"]
    assert choice["token_ids"] == want.outputs[0].token_ids
    assert choice["text"] == want.outputs[0].text
    assert tokenizer.encode(TEXTS[0]).ids == want.prompt_token_ids
