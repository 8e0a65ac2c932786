"""llama.cpp on a model's file, in this process: the oracle of what it answers.

It rounds the rows that meet quantised weights to 8 bits, which moves log-probabilities of SmolLM2
by 0.4. On a file of float32 it rounds nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np
import xllamacpp
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

MAX_LENGTH = 2048  # tokens of a prompt and its answer


@dataclass(frozen=True)
class Choice:
    """A greedy token, and the natural logarithms of the most likely tokens' probabilities."""

    token_id: int
    logprobs: dict[int, float]


class LlamaCpp:
    """A server in this process, with one slot and one thread."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = MAX_LENGTH
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.warmup = False
        params.verbosity = 1  # errors
        self._server = xllamacpp.Server(params)
        self._open = build_opener(ProxyHandler({})).open  # proxies of the shell are ignored

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Ids of a text.

        add_special: begin as the file says, often with a token for the beginning of a text.
        parse_special: special tokens that are written out become one id each.
        """
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return self._post("/tokenize", body)["tokens"]

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._post("/detokenize", {"tokens": [*token_ids]})["content"]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        """Messages in the words of the file's chat template."""
        return self._post("/apply-template", {"messages": [*messages], **more})["prompt"]

    def greedy(self, prompt: str | Sequence[int], max_tokens: int, top: int = 2) -> list[Choice]:
        """Each token of the answer with the `top` most likely ones, the end token included.

        A prompt that is a text becomes ids with the file's special tokens.
        """
        body = {
            "prompt": prompt if isinstance(prompt, str) else [*prompt],
            "n_predict": max_tokens,
            "temperature": 0,
            "n_probs": top,
            "cache_prompt": False,
        }
        answer = self._post("/completion", body)
        return [
            Choice(one["id"], {other["id"]: other["logprob"] for other in one["top_logprobs"]})
            for one in answer["completion_probabilities"]
        ]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        address = self._server.listening_address + path
        headers = {"Content-Type": "application/json"}
        with self._open(Request(address, json.dumps(body).encode(), headers)) as response:
            return json.load(response)


def write_float32(path: Path, target: Path) -> Path:
    """The same model with every tensor in float32, as the package `gguf` reads it."""
    reader = GGUFReader(path)
    alignment = reader.alignment
    infos_at = min(tensor.field.offset for tensor in reader.tensors)
    offset = 0
    with target.open("wb") as out:
        out.write(path.read_bytes()[:infos_at])
        for tensor in reader.tensors:
            name, shape = tensor.name.encode(), tensor.shape
            out.write(len(name).to_bytes(8, "little") + name)
            out.write(len(shape).to_bytes(4, "little") + shape.astype("<u8").tobytes())
            out.write(int(GGMLQuantizationType.F32).to_bytes(4, "little"))
            out.write(offset.to_bytes(8, "little"))
            offset += -(-4 * int(tensor.n_elements) // alignment) * alignment
        for tensor in reader.tensors:
            out.write(bytes(-out.tell() % alignment))
            out.write(dequantize(tensor.data, tensor.tensor_type).astype(np.float32).tobytes())
        out.write(bytes(-out.tell() % alignment))
    return target
