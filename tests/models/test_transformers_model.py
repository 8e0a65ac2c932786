"""Networks of the transformers library on the paged cache, against the library's own attention."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import (
    BartConfig,
    DogeConfig,
    FalconConfig,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    LlamaConfig,
    MambaConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen3NextConfig,
    T5Config,
    XmodConfig,
)

from outdraft.attention.rows import Span
from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.torch.table import reference_kernels
from outdraft.kv.cache import KVCache
from outdraft.models.base import LanguageModel
from outdraft.models.choose import load_language_model, uses_transformers
from outdraft.models.library.checkpoint import Packing
from outdraft.models.library.operations import NAME, register
from outdraft.models.library.products import pack_products
from outdraft.models.library.survey import check_packed
from tests.models.checkpoints import TINY, VARIANTS, llama, randomised, save
from tests.models.families import CONFIGS, family_model, randomise, randomised_family
from tests.row_batches import row_batch

CPU = torch.device("cpu")
BLOCK_SIZE = 8
NUM_TOKENS = 50
# Behind the 15th row of its part, the first text goes on twice as it does and twice otherwise.
PARENTS = (0, 0, 2, 2, 4, 5, 6)
IS_TEXT = (False, True, False, True, True, True, True)


def loaded(path: Path, dtype: torch.dtype = torch.float64, **options: Any) -> LanguageModel:
    kernels = options.pop("kernels", reference_kernels(in_order=True))
    return load_language_model(path, dtype, CPU, kernels, implementation="transformers", **options)


class Texts:
    """Two texts that are read in parts, the last part of the first one as a tree."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.cache = KVCache(model.shard.cache_shapes, 40, BLOCK_SIZE, model.dtype, CPU)
        generator = torch.Generator().manual_seed(1)
        size = model.config.vocab_size
        self.ids_2T = torch.randint(3, size, (2, NUM_TOKENS), generator=generator)

    def read(self, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Logits [2, T, V] of all tokens, and the taps of the last 30 of the second text."""
        first, second = self.ids_2T
        blocks = [*range(1, 9)], [*range(20, 28)]
        logits_2TV = torch.zeros(2, NUM_TOKENS, self.model.config.vocab_size, dtype=torch.float64)
        spans = [Span(0, 30, (), blocks[0]), Span(0, 20, (), blocks[1])]
        logits, _ = self._pass(spans, torch.cat([first[:30], second[:20]]))
        logits_2TV[0, :30], logits_2TV[1, :20] = logits[:30], logits[30:]
        is_text = torch.tensor(IS_TEXT)
        drafts = torch.full((len(PARENTS),), 7)
        drafts[is_text] = first[45:]
        spans = [Span(30, 15, PARENTS, blocks[0]), Span(20, 30, (), blocks[1])]
        rows = torch.cat([first[30:45], drafts, second[20:]])
        logits, tapped = self._pass(spans, rows, taps)
        logits_2TV[0, 30:45], logits_2TV[0, 45:] = logits[:15], logits[15:22][is_text]
        logits_2TV[1, 20:] = logits[22:]
        return logits_2TV, tapped[22:]

    def _pass(
        self, spans: list[Span], ids_T: Tensor, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        metadata = row_batch(spans, BLOCK_SIZE)
        with torch.inference_mode():
            hidden_TD, tapped_TKD = self.model.forward_tapped(
                ids_T, self.cache.layers, metadata, taps
            )
            return self.model.logits(hidden_TD).double(), tapped_TKD


@pytest.mark.parametrize("family", CONFIGS)
def test_parts_and_a_tree_give_what_whole_texts_give(family: str, tmp_path: Path) -> None:
    """Logits, and the residual stream before, between and behind the layers."""
    oracle = randomised_family(family)
    save(oracle, tmp_path)
    texts = Texts(loaded(tmp_path))
    num_layers = texts.model.config.num_layers
    got_2TV, tapped_TKD = texts.read((0, 1, num_layers))
    oracle = oracle.double()
    oracle.set_experts_implementation("eager")  # the others do not know float64
    behind_last: list[Tensor] = []
    # What the library calls the last hidden state has passed the final norm.
    layers = [part for name, part in oracle.named_modules() if name.endswith(f".{num_layers - 1}")]
    layers[0].register_forward_hook(
        lambda _, __, out: behind_last.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.inference_mode():
        want = oracle(input_ids=texts.ids_2T, output_hidden_states=True)
    # The library's norms are of float32, whatever the model is.
    torch.testing.assert_close(got_2TV, want.logits, atol=1e-5, rtol=1e-5)
    streams = [want.hidden_states[0], want.hidden_states[1], behind_last[0]]
    for tap, stream_2TD in enumerate(streams):
        torch.testing.assert_close(tapped_TKD[:, tap], stream_2TD[1, 20:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma-2", "gpt-2", "qwen-3-moe", "falcon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """torch takes other code for what is left over of a row that fills no whole registers."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 64}
    if family != "falcon":
        sizes["head_dim"] = 32
    save(randomised_family(family, **sizes), tmp_path)
    model = loaded(tmp_path, dtype, kernels=choose_kernels("auto", CPU, dtype))
    texts = Texts(model)
    whole_2TV, _ = texts.read()
    other = Texts(model)
    for start in range(0, NUM_TOKENS, 7):  # the second text alone, in other parts
        part = other.ids_2T[1, start : start + 7]
        logits, _ = other._pass([Span(start, len(part), (), [*range(20, 28)])], part)
        assert torch.equal(logits, whole_2TV[1, start : start + 7])


@pytest.mark.parametrize("variant", ["llama", "llama-biases", "llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("quantization", [None, WeightFormat.INT8])
def test_it_is_the_network_that_this_engine_has_itself(
    variant: str, quantization: WeightFormat | None, tmp_path: Path
) -> None:
    save(randomised(VARIANTS[variant]()), tmp_path)
    kernels = choose_kernels("auto", CPU, torch.float32)
    place = tmp_path, torch.float32, CPU, kernels
    own = load_language_model(*place, quantization=quantization)
    theirs = loaded(tmp_path, torch.float32, kernels=kernels, quantization=quantization)
    assert theirs.numbers == own.numbers
    assert theirs.config.eos_token_ids == own.config.eos_token_ids
    (got_2TV, _), (want_2TV, _) = Texts(theirs).read(), Texts(own).read()
    torch.testing.assert_close(got_2TV, want_2TV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma", "gemma-2", "gemma-3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_the_engines_own(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also those of Gemma, which multiply by 1 + weight in float32."""
    save(randomised_family(family), tmp_path)
    model = loaded(tmp_path, dtype, kernels=choose_kernels("auto", CPU, dtype))
    names = {type(part).__name__ for part in model.modules() if "Norm" in type(part).__name__}
    assert names == {"FusedNorm"}


def test_frequencies_of_longrope_follow_from_the_longest_text(tmp_path: Path) -> None:
    """The library would take others for the rows of a long text than for those of a short one."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    changes = {"rope_type": "longrope", "original_max_position_embeddings": 64, **factors}
    rope = {"rope_theta": 10000.0, **changes}
    oracle = randomised(llama(rope_parameters=rope, original_max_position_embeddings=64))
    save(oracle, tmp_path)
    for context_len in (64, 96):
        model = loaded(tmp_path, max_model_len=context_len)
        own = load_language_model(
            tmp_path, torch.float64, CPU, model.kernels, max_model_len=context_len
        )
        assert model.config.depends_on_context
        (got_2TV, _), (want_2TV, _) = Texts(model).read(), Texts(own).read()
        torch.testing.assert_close(got_2TV, want_2TV, atol=1e-6, rtol=1e-6)


def written(config: PretrainedConfig, path: Path, architecture: str) -> Path:
    config.architectures = [architecture]
    config.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("config", "architecture", "message"),
    [
        (MambaConfig(num_hidden_layers=1), "MambaForCausalLM", "recurrent"),
        (Qwen3NextConfig(num_hidden_layers=4), "Qwen3NextForCausalLM", "recurrent"),
        (T5Config(), "T5ForConditionalGeneration", "only continues texts"),
        (LlamaConfig(), "LlamaForSequenceClassification", "only continues texts"),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    config: PretrainedConfig, architecture: str, message: str, tmp_path: Path
) -> None:
    written(config, tmp_path, architecture)
    with pytest.raises(ConfigError, match=f"(?s){architecture}.*{message}"):
        loaded(tmp_path)


def test_a_bias_on_the_scores_is_refused(tmp_path: Path) -> None:
    sizes = {key: TINY[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")}
    config = FalconConfig(**sizes, num_hidden_layers=2, alibi=True)
    written(config, tmp_path, "FalconForCausalLM")
    with pytest.raises(ConfigError, match="alibi adds to the scores"):
        loaded(tmp_path, has_random_weights=True)


@pytest.mark.parametrize(
    ("config", "architecture", "message"),
    [
        (BartConfig(d_model=32, vocab_size=61), "BartForCausalLM", "depend on their order"),
        (DogeConfig(**TINY), "DogeForCausalLM", "adds to the scores"),
        (XmodConfig(**TINY, is_decoder=True), "XmodForCausalLM", "language unknown"),
        (OlmoeConfig(**TINY | {"sliding_window": 7}), "OlmoeForCausalLM", "masks say None"),
    ],
)
def test_what_the_librarys_code_does_otherwise_is_refused(
    config: PretrainedConfig, architecture: str, message: str, tmp_path: Path
) -> None:
    """Bart takes positions and ignores them; Doge makes masks; OLMoE's window is not in its."""
    written(config, tmp_path, architecture)
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, has_random_weights=True)


@pytest.mark.parametrize("family", ["cohere", "gpt-neox", "llama"])
def test_a_window_that_the_family_does_not_read_changes_nothing(
    family: str, tmp_path: Path
) -> None:
    oracle = randomised_family(family, sliding_window=7)
    save(oracle, tmp_path)
    texts = Texts(loaded(tmp_path))
    with torch.inference_mode():
        want_2TV = oracle.double()(input_ids=texts.ids_2T).logits
    torch.testing.assert_close(texts.read()[0], want_2TV, atol=1e-5, rtol=1e-5)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    save(randomised_family("olmo-2"), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match=r"missing keys: model\.layers\.3"):
        loaded(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    model = family_model("gpt-2")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        loaded(tmp_path)


def test_families_that_this_engine_has_are_its_own_unless_asked(tmp_path: Path) -> None:
    save(family_model("qwen-3"), tmp_path / "known")
    save(family_model("phi-3"), tmp_path / "other")
    assert not uses_transformers(tmp_path / "known")
    assert uses_transformers(tmp_path / "known", "transformers")
    assert uses_transformers(tmp_path / "other")
    assert not uses_transformers(tmp_path / "other", "outdraft")


def test_a_random_model_is_the_same_every_time(tmp_path: Path) -> None:
    written(CONFIGS["phi-3"](), tmp_path, "Phi3ForCausalLM")
    one, other = (Texts(loaded(tmp_path, has_random_weights=True)) for _ in range(2))
    assert torch.equal(one.read()[0], other.read()[0])


@pytest.mark.parametrize(
    ("changes", "num_threads"), [({}, 1), ({"hidden_act": "relu"}, 3)], ids=["packed", "torch's"]
)
def test_torch_leaves_the_cores_to_kernels_that_have_all_products(
    changes: dict[str, Any], num_threads: int, tmp_path: Path
) -> None:
    """The kernels have no experts with ReLU: torch multiplies those, with all its threads."""
    save(randomised_family("mixtral", **changes), tmp_path)
    kernels = replace(reference_kernels(in_order=True), has_threads=True)
    texts = Texts(loaded(tmp_path, kernels=kernels))
    seen, before = set[int](), torch.get_num_threads()
    hook = register_module_forward_hook(lambda *_: seen.add(torch.get_num_threads()))
    torch.set_num_threads(3)
    try:
        texts.read()
        after = torch.get_num_threads()
    finally:
        hook.remove()
        torch.set_num_threads(before)
    assert seen - {3} == {num_threads} - {3}
    assert after == 3


def test_drafters_cannot_read_several_streams(tmp_path: Path) -> None:
    config = Gemma3nTextConfig(
        **TINY | {"num_hidden_layers": 4},
        sliding_window=7,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=TINY["vocab_size"],
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    config.architectures = ["Gemma3nForCausalLM"]
    oracle = randomise(Gemma3nForCausalLM(config))
    save(oracle, tmp_path)
    texts = Texts(loaded(tmp_path))
    with torch.inference_mode():
        want_2TV = oracle.double()(input_ids=texts.ids_2T).logits
    torch.testing.assert_close(texts.read()[0], want_2TV, atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="passes on 2 streams"):
        texts.read((1,))


class _ReadsAWeight(nn.Module):
    """A block that multiplies, and looks at the weight beside."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.part = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) * self.part.weight.mean()


def test_code_that_reads_a_weight_that_is_packed_is_refused() -> None:
    register()
    model = randomised_family("llama")
    model.set_attn_implementation(NAME)
    model.get_submodule("model.layers.1").mlp = _ReadsAWeight(32)
    check_packed(model, None)
    pack_products(model, Packing(reference_kernels(in_order=True)))
    with pytest.raises(ConfigError, match="cannot run once its weights are packed"):
        check_packed(model, None)
