"""Converts a checkpoint to an engine's own format, in its environment; bfloat16 stays as it is.

`python convert.py openvino MODEL FOLDER`, `python convert.py gguf MODEL FILE SOURCES_OF_LLAMA_CPP`.
"""

import sys
from pathlib import Path


def to_gguf(model: Path, output: Path, sources: Path) -> None:
    """By llama.cpp's own script, which knows tokenizers by a hash of what they make of a text.

    It does not know ours. Prompts come as token ids, so how it would split a text is no matter.
    """
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    import convert_hf_to_gguf
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert", str(model), "--outfile", str(output), "--outtype", "bf16"]
    convert_hf_to_gguf.main()


def to_openvino(model: Path, output: Path) -> None:
    """The network, and the tokenizer that GenAI's pipeline asks for."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoTokenizer

    network = OVModelForCausalLM.from_pretrained(
        model, export=True, compile=False, load_in_8bit=False, torch_dtype="bfloat16"
    )
    network.save_pretrained(output)
    parts = convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
    for part, name in zip(parts, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(part, output / f"openvino_{name}.xml")


if __name__ == "__main__":
    convert = {"gguf": to_gguf, "openvino": to_openvino}[sys.argv[1]]
    convert(*map(Path, sys.argv[2:]))
