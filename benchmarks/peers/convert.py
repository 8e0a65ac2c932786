"""Converts a checkpoint to an engine's own format, in its environment.

bfloat16 stays as it is, or becomes 8 bits per output or 4 bits in groups of 32.

`python convert.py openvino MODEL FOLDER [BITS]`, `python convert.py gguf MODEL FILE SOURCES`, where
SOURCES are llama.cpp's.
"""

import sys


def to_gguf(model: str, output: str, sources: str) -> None:
    """By llama.cpp's own script, which knows tokenizers by a hash of what they make of a text.

    It does not know ours. Prompts come as token ids, so how it would split a text is no matter.
    """
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    import convert_hf_to_gguf
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert", model, "--outfile", output, "--outtype", "bf16"]
    convert_hf_to_gguf.main()


def to_openvino(model: str, output: str, bits: str = "16") -> None:
    """The network, and the tokenizer that GenAI's pipeline asks for."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    weights = {
        "16": {"load_in_8bit": False},
        "8": {"quantization_config": OVWeightQuantizationConfig(bits=8)},
        "4": {"quantization_config": OVWeightQuantizationConfig(bits=4, sym=True, group_size=32)},
    }
    network = OVModelForCausalLM.from_pretrained(
        model, export=True, compile=False, torch_dtype="bfloat16", **weights[bits]
    )
    network.save_pretrained(output)
    parts = convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
    for part, name in zip(parts, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(part, f"{output}/openvino_{name}.xml")


if __name__ == "__main__":
    convert = {"gguf": to_gguf, "openvino": to_openvino}[sys.argv[1]]
    convert(*sys.argv[2:])
