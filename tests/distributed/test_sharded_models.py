"""Models that are spread over ranks against the same models on one."""

import shutil
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import Ranks
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.torch.linear import quantized
from outdraft.models.checkpoints import files as filling
from outdraft.models.choose import load_language_model
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.config import ModelConfig
from outdraft.models.decoder.loader import load_model
from tests.models.checkpoints import (
    TINY,
    VARIANTS,
    chunked_logits,
    llama,
    random_tokens,
    randomised,
    save,
)
from tests.models.families import randomised_family
from tests.ranks import on_ranks
from tests.rounding import MODEL_ROUNDING, SHORTS_ROUNDING

CPU = torch.device("cpu")
NUM_TOKENS = 64
SIZES = [2, 4]
SOME_SLOW = [2, pytest.param(4, marks=pytest.mark.slow)]
# Biases, query-key norms, windows, tied heads; 2 kv heads are fewer than 4 ranks, 4 are not.
FAMILIES = (
    *("llama", "llama-tied", "llama-biases", "llama-one-head-each", "llama-llama3-rope"),
    *("mistral-window", "qwen2", "qwen3", "qwen3-window"),
)
CHUNKS = {size: [size] * (NUM_TOKENS // size) for size in (1, 2, 64)} | {5: [5] * 12 + [4]}
KINDS = [
    pytest.param("reference", torch.float64, id="float64"),
    pytest.param("reference", torch.float32, id="float32-reference"),
    pytest.param("reference", torch.bfloat16, id="bfloat16-reference"),
    pytest.param("reference", torch.float16, id="float16-reference"),
    pytest.param("auto", torch.float32, id="float32"),
    pytest.param("auto", torch.float16, id="float16"),
    pytest.param("auto", torch.bfloat16, id="bfloat16"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of tiny models, each made once."""
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = save(randomised(VARIANTS[family]()), folder)
        return made[family]

    return of


def load(
    path: Path,
    ranks: Ranks,
    dtype: torch.dtype = torch.float64,
    kernels: str = "reference",
    quantization: WeightFormat | None = None,
) -> CausalLM:
    table = choose_kernels(kernels, CPU, dtype, activation_dtype="float")
    return load_model(path, dtype, CPU, table, None, quantization, ranks.target)


def joined(parts: list[Tensor], vocab_size: int = TINY["vocab_size"]) -> Tensor:
    """[T, V]: the columns of all ranks; what is behind the vocabulary is never the best."""
    whole = torch.cat(parts, dim=1)
    assert (whole[:, vocab_size:] == -torch.inf).all()
    return whole[:, :vocab_size]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_columns_of_all_ranks_are_the_logits_of_one(
    family: str, size: int, checkpoint: Callable[[str], Path]
):
    path, ids_T = checkpoint(family), random_tokens(NUM_TOKENS)
    want_TV = chunked_logits(load(path, Ranks()), ids_T, [20, 44])

    parts = on_ranks(size, 1, lambda ranks: chunked_logits(load(path, ranks), ids_T, [20, 44]))

    assert all(part.shape == (NUM_TOKENS, -(-TINY["vocab_size"] // size)) for part in parts)
    got_TV = joined(parts)
    assert want_TV.std() > 0.3  # there is something to get wrong
    assert (got_TV - want_TV).abs().max() <= 1e-10
    assert torch.equal(got_TV.argmax(-1), want_TV.argmax(-1))


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize("size", SOME_SLOW)
@pytest.mark.parametrize(("kernels", "dtype"), KINDS)
def test_rows_have_the_same_bits_in_chunks_of_any_size(
    kernels: str, dtype: torch.dtype, size: int, checkpoint: Callable[[str], Path]
):
    path, ids_T = checkpoint("qwen3-window"), random_tokens(NUM_TOKENS)

    def logits_in_chunks(ranks: Ranks) -> dict[int, Tensor]:
        model = load(path, ranks, dtype, kernels)
        return {chunk: chunked_logits(model, ids_T, sizes) for chunk, sizes in CHUNKS.items()}

    for rank, logits in enumerate(on_ranks(size, 1, logits_in_chunks)):
        for chunk, part_TS in logits.items():
            assert torch.equal(part_TS, logits[64]), f"rank {rank}, chunks of {chunk}"


@pytest.mark.parametrize("size", SOME_SLOW)
@pytest.mark.parametrize(("kernels", "dtype"), KINDS)
def test_rounding_is_all_that_ranks_change(
    kernels: str, dtype: torch.dtype, size: int, checkpoint: Callable[[str], Path]
):
    path, ids_T = checkpoint("qwen2"), random_tokens(NUM_TOKENS)
    exact_TV = chunked_logits(load(path, Ranks()), ids_T, [NUM_TOKENS])
    bound = MODEL_ROUNDING if dtype.itemsize > 2 else short_bound(size, dtype)

    parts = on_ranks(
        size,
        1,
        lambda ranks: chunked_logits(load(path, ranks, dtype, kernels), ids_T, [NUM_TOKENS]),
    )

    got_TV = joined(parts)
    assert got_TV.dtype is torch.promote_types(dtype, torch.float32)
    assert (got_TV - exact_TV).abs().max() <= bound * exact_TV.abs().max()


def short_bound(size: int, dtype: torch.dtype) -> float:
    """Where each layer rounds its norms, q, k, v, scores' values, gate, up, their product and both
    sums to 16 bits once, and the parts of both sums once for each rank; weights are rounded too."""
    return (TINY["num_hidden_layers"] * (14 + 2 * size) + 3) * torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("size", SIZES)
def test_the_best_token_of_all_ranks_is_that_of_one(size: int):
    """The first of equal ones, and a NaN before all; it is told whether its logit is finite."""
    logits_RV = torch.randint(0, 4, (200, 61), generator=torch.Generator().manual_seed(0)).float()
    logits_RV[0] = -torch.inf
    logits_RV[1] = 3.0
    logits_RV[2, [7, 60]] = torch.nan
    logits_RV[3, 60] = torch.inf
    logits_RV[4:60:5, 40] = torch.nan
    want_R = logits_RV.argmax(-1)
    is_finite_R = logits_RV.gather(1, want_R[:, None])[:, 0].isfinite()

    def best(ranks: Ranks) -> tuple[Tensor, Tensor]:
        shard = VocabularyShard(ranks.target, 61)
        own_RN = logits_RV[:, shard.first :][:, : shard.num_own]
        return shard.best_tokens(shard.padded(own_RN))

    for got_R, is_finite in on_ranks(size, 1, best):
        assert torch.equal(got_R, want_R)
        assert torch.equal(is_finite, is_finite_R)


@pytest.mark.slow
def test_no_token_is_behind_a_vocabulary_whose_logits_are_capped(tmp_path: Path):
    """The cap is so low that logits are equal but for their signs."""
    model = randomised_family("gemma-2", final_logit_softcapping=1e-3)
    model.save_pretrained(tmp_path)
    kernels = choose_kernels("reference", CPU, torch.float64)
    hidden_RD = torch.randn(30, TINY["hidden_size"], generator=torch.Generator().manual_seed(3))
    hidden_RD = hidden_RD.double() * 1e3

    def capped(ranks: Ranks) -> tuple[Tensor, Tensor]:
        part = load_language_model(tmp_path, torch.float64, CPU, kernels, group=ranks.target)
        return part.logits(hidden_RD), part.checked_best_tokens(hidden_RD)[0]

    want_RV, want_R = capped(Ranks())
    assert (want_RV.abs() <= 1e-3).all()

    found = on_ranks(2, 1, capped)

    assert torch.equal(joined([logits for logits, _ in found]), want_RV)
    assert all(torch.equal(best_R, want_R) for _, best_R in found)


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_knows_the_best_tokens_of_a_target(size: int, checkpoint: Callable[[str], Path]):
    path = checkpoint("llama-tied")
    hidden_RD = torch.randn(9, TINY["hidden_size"], generator=torch.Generator().manual_seed(3))
    hidden_RD = hidden_RD.double()
    want_R, _ = load(path, Ranks()).checked_best_tokens(hidden_RD)

    found = on_ranks(size, 1, lambda ranks: load(path, ranks).checked_best_tokens(hidden_RD))

    for best_R, is_finite_R in found:
        assert torch.equal(best_R, want_R)
        assert is_finite_R.all()


@pytest.mark.parametrize("size", SIZES)
def test_a_pass_costs_two_sums_a_layer_and_one_for_the_embedding(
    size: int, checkpoint: Callable[[str], Path]
):
    path, num_rows, layers = checkpoint("llama"), 13, TINY["num_hidden_layers"]
    row_bytes = TINY["hidden_size"] * 8

    def traffic(ranks: Ranks) -> None:
        model = load(path, ranks)
        calls, sent = ranks.target.calls, ranks.target.sent_bytes
        assert not calls  # so far
        chunked_logits(model, random_tokens(num_rows), [num_rows])
        assert calls == {"sum": 2 * layers + 1}
        assert sent == {"sum": (size - 1) * (2 * layers + 1) * num_rows * row_bytes}
        model.checked_best_tokens(torch.zeros(num_rows, TINY["hidden_size"]).double())
        assert calls == {"sum": 2 * layers + 1, "gather": 1}
        assert sent["gather"] == (size - 1) * num_rows * (8 + 8)

    on_ranks(size, 1, traffic)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-biases", "qwen3-window"])
@pytest.mark.parametrize("has_random_weights", [False, True])
def test_each_rank_has_its_part_of_the_weights_of_one(
    has_random_weights: bool, family: str, size: int, checkpoint: Callable[[str], Path]
):
    path, kernels = checkpoint(family), choose_kernels("reference", CPU, torch.float64)
    make = partial(
        load_model, path, torch.float64, CPU, kernels, has_random_weights=has_random_weights
    )
    whole = make().checkpoint_slots()
    covered = {name: torch.zeros_like(slot.to) for name, slot in whole.items()}

    for model in on_ranks(size, 1, lambda ranks: make(group=ranks.target)):
        for name, slot in model.checkpoint_slots().items():
            assert slot.shape == list(whole[name].to.shape)
            assert torch.equal(slot.to, whole[name].to[slot.indices])
            covered[name][slot.indices].add_(1)

    assert all((count >= 1).all() for count in covered.values())
    once = ("embed_tokens", "lm_head", "q_proj.weight", "o_proj.weight", "gate", "down_proj.weight")
    for name, count in covered.items():
        if any(part in name for part in once):
            assert (count == 1).all()


class _CountingFile:
    """A safetensors file that counts the bytes that are taken out of it."""

    def __init__(self, file: Any, taken: Counter[int]) -> None:
        self._file, self._taken = file, taken

    def __enter__(self) -> "_CountingFile":
        self._opened = self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> Any:
        return self._opened.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._counted(self._opened.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        return _CountingSlice(self._opened.get_slice(name), self._counted)

    def _counted(self, tensor: Tensor) -> Tensor:
        self._taken[threading.get_ident()] += tensor.nbytes
        return tensor


class _CountingSlice:
    def __init__(self, whole: Any, counted: Callable[[Tensor], Tensor]) -> None:
        self._whole, self._counted = whole, counted
        self.get_shape, self.get_dtype = whole.get_shape, whole.get_dtype

    def __getitem__(self, places: Any) -> Tensor:
        return self._counted(self._whole[places])


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_reads_its_part_of_the_files_only(
    size: int, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    path, taken = checkpoint("llama-one-head-each"), Counter[int]()
    open_file = filling.safe_open
    monkeypatch.setattr(
        filling,
        "safe_open",
        lambda *args, **kwargs: _CountingFile(open_file(*args, **kwargs), taken),
    )

    def read_and_kept(ranks: Ranks) -> tuple[int, int]:
        slots = load(path, ranks).checkpoint_slots().values()
        kept = sum(slot.to.numel() * 4 for slot in slots)  # of a file of float32
        return taken[threading.get_ident()], kept

    tensors = load_file(path / "model.safetensors").values()
    shared = sum(tensor.nbytes for tensor in tensors if tensor.dim() == 1)  # norms
    found = on_ranks(size, 1, read_and_kept)
    for read, kept in found:
        assert read == kept
    assert sum(read for read, _ in found) == sum(t.nbytes for t in tensors) + shared * (size - 1)


@pytest.mark.parametrize("kept", [WeightFormat.INT8, WeightFormat.INT4_G32])
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_rounds_its_part_of_the_weights(
    size: int, kept: WeightFormat, checkpoint: Callable[[str], Path], tmp_path: Path
):
    """As a whole model with the numbers that each rank's part is rounded to."""
    path, ids_T = checkpoint("llama"), random_tokens(NUM_TOKENS)
    for file in ("config.json", "generation_config.json"):
        shutil.copy(path / file, tmp_path)
    tensors = {name: one.double() for name, one in load_file(path / "model.safetensors").items()}
    for name, one in tensors.items():
        if "proj" in name or "lm_head" in name:
            columns = ("o_proj" in name or "down_proj" in name) and size
            parts = one.chunk(columns or 1, dim=1)
            tensors[name] = torch.cat([quantized(part, kept) for part in parts], dim=1)
    save_file(tensors, tmp_path / "model.safetensors")
    want_TV = chunked_logits(load(tmp_path, Ranks()), ids_T, [NUM_TOKENS])

    def logits(ranks: Ranks) -> Tensor:
        return chunked_logits(load(path, ranks, quantization=kept), ids_T, [NUM_TOKENS])

    got_TV = joined(on_ranks(size, 1, logits))

    assert (got_TV - want_TV).abs().max() <= 1e-9


@pytest.mark.parametrize("kept", [WeightFormat.INT8, WeightFormat.INT4, WeightFormat.INT4_G32])
@pytest.mark.parametrize("size", SIZES)
def test_the_library_packs_parts_as_the_reference_rounds_them(
    size: int, kept: WeightFormat, checkpoint: Callable[[str], Path]
):
    path, ids_T = checkpoint("llama"), random_tokens(NUM_TOKENS)

    def logits(kernels: str) -> Callable[[Ranks], Tensor]:
        return lambda ranks: chunked_logits(
            load(path, ranks, torch.float32, kernels, kept), ids_T, [NUM_TOKENS]
        )

    want_TV = joined(on_ranks(size, 1, logits("reference")))
    got_TV = joined(on_ranks(size, 1, logits("auto")))

    assert (got_TV - want_TV).abs().max() <= SHORTS_ROUNDING * want_TV.abs().max()


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (3, {}),  # 4 heads
        (4, {"intermediate_size": 50}),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96}),
        (4, {"vocab_size": 9}),  # 3 + 3 + 3 + 0
    ],
)
def test_ranks_that_do_not_divide_a_model_are_refused_with_those_that_do(
    size: int, changes: dict[str, int]
):
    raw = llama(**changes).config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    config = ModelConfig.from_mapping(raw)
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size {size} .*: choose 1, 2\b"):
        config.shard(size)


def test_a_draft_vocabulary_with_too_few_tokens_is_refused():
    with pytest.raises(ConfigError, match="a vocabulary of 9 tokens cannot be spread over 4 ranks"):
        on_ranks(4, 1, lambda ranks: VocabularyShard(ranks.target, 9))
