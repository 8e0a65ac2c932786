"""GGUF files against transformers over the numbers that the gguf package reads from them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

from outdraft import LLM, SamplingParams
from outdraft.core.errors import ConfigError
from outdraft.core.weights import BLOCK_FORMATS, WeightFormat
from outdraft.kernels.choose import choose_kernels
from outdraft.models.checkpoints.files import resolve_model_path
from outdraft.models.checkpoints.gguf_weights import gguf_weights
from outdraft.models.decoder.config import ModelConfig
from outdraft.models.decoder.loader import load_model
from outdraft.models.modules import linears_of
from outdraft.text.chat import ChatTemplate
from outdraft.text.tokenizer import load_tokenizer
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import chunked_logits, llama, mistral, qwen2, qwen3, randomised, save
from tests.models.quantized.gguf_files import SIZES, byte_level, same_numbers, write_gguf
from tests.rounding import model_bound

TEXTS = ("a tale of two cities", "the cities of the plain", "tall tales, tall cities")
MODELS = {
    "llama": lambda: llama(**SIZES),
    "llama-biases": lambda: llama(**SIZES, attention_bias=False, mlp_bias=False, head_dim=32),
    "mistral": lambda: mistral(**SIZES, sliding_window=None),
    "qwen2": lambda: qwen2(**SIZES),
    "qwen3": lambda: qwen3(**SIZES),
}
KINDS = {
    Kind.F32: WeightFormat.FLOAT32,
    Kind.F16: WeightFormat.FLOAT32,
    Kind.BF16: WeightFormat.BFLOAT16,
    **{Kind[one.upper()]: one for one in BLOCK_FORMATS},
}


def assert_same_logits(path: Path, theirs: PreTrainedModel) -> set[WeightFormat]:
    """The logits are transformers'; the formats of all products."""
    model = load_model(path, torch.float32, "cpu", cpu_kernels())
    generator = torch.Generator().manual_seed(0)
    token_ids_T = torch.randint(0, SIZES["vocab_size"], (23,), generator=generator)
    with torch.no_grad():
        wanted = theirs(token_ids_T[None]).logits[0]
    got = chunked_logits(model, token_ids_T, [15, 1, 7])
    formats = {linear.format for linear in linears_of(model)}
    tolerance = model_bound(formats) * max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)
    return formats


@pytest.mark.parametrize(
    "kind", [Kind.Q4_0, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name
)
def test_drafts_change_nothing_where_rows_become_bytes(kind: Kind, tmp_path: Path):
    vocabulary = split_as("qwen2")
    model = randomised(llama(**SIZES | {"vocab_size": len(vocabulary["tokens"])}))
    path = write_gguf(model, tmp_path / "model.gguf", lambda name: kind, vocabulary)
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9] * 12, [*range(10, 40)]]
    params = [
        SamplingParams(temperature=temperature, max_tokens=24, seed=3, ignore_eos=True)
        for temperature in (0.0, 0.8, 1.0)
    ]
    answers: list[list[list[int]]] = []
    for speculation in (None, {"method": "suffix", "num_speculative_tokens": 5}):
        llm = LLM(str(path), activation_dtype="int8", speculative_config=speculation)
        answers.append([out.outputs[0].token_ids for out in llm.generate(prompts, params)])
    assert answers[0] == answers[1]


def test_rows_become_bytes_unless_floats_are_asked_for(tmp_path: Path):
    path = write_gguf(randomised(llama(**SIZES)), tmp_path / "model.gguf", lambda name: Kind.Q4_K)
    logits = dict[str, torch.Tensor]()
    for asked in ("auto", "int8", "float"):
        device, dtype = torch.device("cpu"), torch.float32
        kernels = choose_kernels("auto", device, dtype, activation_dtype=asked)
        model = load_model(path, dtype, "cpu", kernels)
        logits[asked] = chunked_logits(model, torch.arange(20), [20])
    assert torch.equal(logits["auto"], logits["int8"])
    assert not torch.equal(logits["auto"], logits["float"])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_rows_become_bytes_only_where_compiled_kernels_multiply_them(dtype: str, tmp_path: Path):
    path = write_gguf(randomised(llama(**SIZES)), tmp_path / "model.gguf", lambda name: Kind.Q4_K)
    kernels = "reference" if dtype == "float32" else "auto"
    with pytest.raises(ConfigError, match=r"activation_dtype int8 needs .* allowed here: auto"):
        LLM(str(path), activation_dtype="int8", dtype=dtype, kernels=kernels)


def test_rows_become_bytes_by_name_only_where_weights_have_few_bits(tmp_path: Path):
    save(randomised(llama(**SIZES)), tmp_path)
    LLM(str(tmp_path), activation_dtype="int8", quantization="int4")
    for quantization in (None, "int8"):
        with pytest.raises(ConfigError, match=r"int8 is for GGUF files and weights of 4 bits, .*"):
            LLM(str(tmp_path), activation_dtype="int8", quantization=quantization)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_blocks_are_kept_as_they_are_and_plain_tensors_too(kind: Kind, tmp_path: Path):
    theirs = randomised(llama(**SIZES))
    path = write_gguf(theirs, tmp_path / "model.gguf", lambda name: kind)

    assert assert_same_logits(path, same_numbers(path, theirs)) == {KINDS[kind]}


@pytest.mark.parametrize("name", MODELS)
def test_each_family_is_read_from_one_file(name: str, tmp_path: Path):
    theirs = randomised(MODELS[name]())
    path = write_gguf(theirs, tmp_path / "model.gguf", lambda name: Kind.Q8_0)

    assert resolve_model_path(path) == path
    assert assert_same_logits(path, same_numbers(path, theirs)) == {WeightFormat.Q8_0}


def test_the_head_and_the_embedding_of_a_tied_model_have_the_same_codes(tmp_path: Path):
    theirs = randomised(qwen3(**SIZES, tie_word_embeddings=True))
    path = write_gguf(theirs, tmp_path / "model.gguf", lambda name: Kind.Q8_0)
    model = load_model(path, torch.float32, "cpu", cpu_kernels())

    assert model.config.tie_word_embeddings
    assert model.lm_head.format is WeightFormat.Q8_0
    assert model.embed_tokens.source is model.lm_head.product
    assert model.memory_bytes < path.stat().st_size


def test_a_product_of_several_kinds_keeps_all_of_them_and_so_does_the_embedding(tmp_path: Path):
    theirs = randomised(llama(**SIZES | {"vocab_size": 61}))
    kinds = {"attn_v": Kind.Q6_K, "ffn_up": Kind.Q5_0, "token_embd": Kind.Q5_K, "output": Kind.Q6_K}
    path = write_gguf(
        theirs,
        tmp_path / "model.gguf",
        lambda name: next((kinds[one] for one in kinds if one in name), Kind.Q4_0),
    )
    model = load_model(path, torch.float32, "cpu", cpu_kernels())

    layer = model.decoder.decoder_layers[0]
    assert layer.qkv_proj.format is layer.gate_up_proj.format is WeightFormat.MIXED
    assert layer.o_proj.format is WeightFormat.Q6_K  # "attn_output"
    assert_same_logits(path, same_numbers(path, theirs))
    exact = same_numbers(path, theirs).model.embed_tokens.weight
    assert torch.equal(model.embed_tokens(torch.arange(61)), exact)


def test_a_kind_without_tiles_is_dequantised_and_so_is_what_ends_within_a_tile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    theirs = randomised(llama(**SIZES | {"intermediate_size": 272}))
    kinds = {"attn_v": Kind.TQ2_0, "ffn_gate": Kind.Q5_0}
    path = write_gguf(
        theirs,
        tmp_path / "model.gguf",
        lambda name: (
            Kind.F32
            if "ffn_down" in name
            else next((kinds[one] for one in kinds if one in name), Kind.Q4_0)
        ),
    )
    with caplog.at_level("INFO", logger="outdraft"):
        model = load_model(path, torch.float32, "cpu", cpu_kernels())

    layer = model.decoder.decoder_layers[0]
    assert layer.qkv_proj.format is layer.gate_up_proj.format is WeightFormat.BFLOAT16
    assert any("parts of the same product do not fit one tile" in m for m in caplog.messages)
    assert any("there are no tiles for TQ2_0" in m for m in caplog.messages)


def test_frequencies_that_the_file_divides_are_those_of_llama_3(tmp_path: Path):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    theirs = randomised(llama(**SIZES, rope_parameters=scaling))
    plain_F = 500.0 ** -(torch.arange(0, 64, 2) / 64)
    factors_F = plain_F / theirs.model.rotary_emb.inv_freq
    path = write_gguf(
        theirs, tmp_path / "model.gguf", lambda name: Kind.F32, rope_factors=factors_F.tolist()
    )

    assert factors_F.max() > 7.9
    assert_same_logits(path, theirs)


SCALED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a factor alone": ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "its name of 2023": ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "none": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
    "yarn without a factor": ({"rope.scaling.type": "yarn"}, {"rope_type": "default"}),
    "yarn": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 24,
            "rope.scaling.yarn_beta_fast": 5.0,
            "rope.scaling.yarn_beta_slow": 0.25,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "beta_fast": 5.0,
            "beta_slow": 0.25,
        },
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_frequencies_are_scaled_as_the_file_says(name: str, tmp_path: Path):
    said, rope = SCALED[name]
    theirs = randomised(llama(**SIZES, rope_parameters={"rope_theta": 500.0, **rope}))
    path = write_gguf(theirs, tmp_path / "model.gguf", lambda name: Kind.F32, more=said)

    assert_same_logits(path, theirs)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "'longrope' is not supp"),
        ({"rope.scaling.factor": 2.0, "rope.scaling.yarn_attn_factor": 0.5}, "yarn_attn_factor"),
        ({"attention.key_length": 128}, "rope.dimension_count 64 of a part of each head"),
    ],
)
def test_what_else_changes_positions_is_refused(said: dict[str, Any], message: str, tmp_path: Path):
    model = randomised(llama(**SIZES))
    path = write_gguf(model, tmp_path / "model.gguf", lambda name: Kind.F32, more=said)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_directory(path)


def split_as(pre: str, **more: Any) -> dict[str, Any]:
    """All bytes, "ab" by a merge, and "abc" that no merge makes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", "<|im_end|>", *alphabet, "ab", "abc"]
    types = [3, 3, 3, *[1] * (len(tokens) - 3)]
    return {"tokens": tokens, "types": types, "merges": ["a b"], "pre": pre, **more}


@pytest.mark.parametrize(
    ("vocabulary", "wanted"),
    [
        (split_as("llama-bpe"), ["<s>", "abc", "1", "2"]),
        (split_as("llama-bpe", adds_bos=False), ["abc", "1", "2"]),
        (split_as("tekken"), ["<s>", "abc", "1", "2"]),
        (split_as("qwen2"), ["ab", "c", "1", "2"]),
        (split_as("qwen2", adds_bos=True), ["<s>", "ab", "c", "1", "2"]),
        (split_as("default"), ["ab", "c", "1", "2"]),
    ],
)
def test_texts_begin_and_are_split_as_llama_cpp_does_it(
    vocabulary: dict[str, Any], wanted: list[str], tmp_path: Path
):
    model = randomised(llama(**SIZES | {"vocab_size": len(vocabulary["tokens"])}))
    path = write_gguf(model, tmp_path / "m.gguf", lambda name: Kind.F16, vocabulary)
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    assert tokenizer.encode("abc12").tokens == wanted
    assert tokenizer.decode(tokenizer.encode("abc12").ids) == "abc12"
    assert ModelConfig.from_directory(path).eos_token_ids == (1, 2)


def test_digits_are_single_and_words_have_their_space_in_files_of_smollm(tmp_path: Path):
    vocabulary = split_as("smollm")
    vocabulary["tokens"] += ["12", "Ġa"]
    vocabulary["types"] += [1, 1]
    vocabulary["merges"] += ["1 2", "Ġ a"]
    model = randomised(llama(**SIZES | {"vocab_size": len(vocabulary["tokens"])}))
    path = write_gguf(model, tmp_path / "m.gguf", lambda name: Kind.F16, vocabulary)
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    assert tokenizer.encode("b a 12").tokens == ["b", "Ġa", "Ġ", "1", "2"]


def test_a_way_to_split_texts_that_is_not_known_is_refused(tmp_path: Path):
    vocabulary = split_as("klingon")
    model = randomised(llama(**SIZES | {"vocab_size": len(vocabulary["tokens"])}))
    path = write_gguf(model, tmp_path / "m.gguf", lambda name: Kind.F16, vocabulary)
    with pytest.raises(ConfigError, match=r"by --tokenizer .*must be one of .*'klingon'"):
        load_tokenizer(path)


def test_the_vocabulary_and_the_template_are_those_of_the_file(tmp_path: Path):
    original, vocabulary = byte_level(TEXTS)
    theirs = randomised(llama(**SIZES | {"vocab_size": len(vocabulary["tokens"])}))
    path = write_gguf(theirs, tmp_path / "m.gguf", lambda name: Kind.F16, vocabulary)

    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    for text in (*TEXTS, "two plains"):
        assert tokenizer.encode(text).ids == original.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    template = ChatTemplate.from_directory(path)
    assert template is not None
    assert template.render([{"role": "user", "content": "hello"}]) == "<s>hello"
    config = ModelConfig.from_directory(path)
    assert (config.bos_token_id, config.eos_token_ids) == (0, (1,))
    assert config.torch_dtype == "float16"


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_step_reads_all_weights_but_an_embedding_of_its_own(is_tied: bool, tmp_path: Path):
    theirs = randomised(llama(**SIZES, tie_word_embeddings=is_tied))
    path = write_gguf(theirs, tmp_path / "model.gguf", lambda name: Kind.Q8_0)
    model = load_model(path, torch.float32, "cpu", cpu_kernels())

    own_table = 0 if is_tied else model.embed_tokens.nbytes
    assert model.weight_bytes == model.memory_bytes - own_table
    assert own_table > 0 or is_tied


def test_a_row_of_one_block_is_cut_by_no_rank(tmp_path: Path):
    theirs = randomised(llama(**SIZES))
    path = write_gguf(theirs, tmp_path / "model.gguf", lambda name: Kind.Q4_K)
    weight = gguf_weights(path)["model.layers.0.self_attn.o_proj.weight"]
    assert weight.shape[1] == 256
    for half in (slice(0, 128), slice(128, 256)):
        part = weight.part(slice(0, 7), half)
        assert part.tile is None
        assert torch.equal(part.numbers(), weight.numbers()[:7, half])
