"""Which files are read, and that a wrong checkpoint is refused by the name of its tensor."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.kernels.torch.table import reference_kernels
from outdraft.models.checkpoints.files import resolve_model_path
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.loader import load_model
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import (
    VARIANTS,
    chunked_logits,
    llama,
    random_tokens,
    randomised,
    save,
)

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(randomised(VARIANTS["llama"]()), tmp_path / "checkpoint")


def load(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(path, dtype, "cpu", reference_kernels())


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / SINGLE)
    change(tensors)
    save_file(tensors, path / SINGLE)


def test_shards_give_the_same_model_as_one_file(tmp_path: Path):
    theirs = randomised(VARIANTS["qwen2"]())
    whole = save(theirs, tmp_path / "whole")
    shards = save(theirs, tmp_path / "shards", max_shard_size="20KB")
    token_ids_T = random_tokens(9)

    assert len(list(shards.glob("*.safetensors"))) > 2
    assert torch.equal(
        chunked_logits(load(shards), token_ids_T, [9]),
        chunked_logits(load(whole), token_ids_T, [9]),
    )


def test_weights_are_converted_to_the_dtype_that_is_asked_for(checkpoint: Path):
    rewrite(
        checkpoint,
        lambda tensors: tensors.update(
            {name: tensor.bfloat16() for name, tensor in tensors.items()}
        ),
    )

    model = load(checkpoint, torch.float64)

    want = load_file(checkpoint / SINGLE)["model.embed_tokens.weight"].double()
    assert torch.equal(model.embed_tokens.source, want)


@pytest.mark.parametrize("make", [cpu_kernels, reference_kernels])
def test_parts_of_one_product_may_be_stored_in_different_dtypes(checkpoint: Path, make):
    def in_bfloat16(tensors: dict[str, Tensor], but: str | None) -> None:
        names = [name for name in tensors if name != but]
        tensors.update({name: tensors[name].bfloat16() for name in names})
        if but is not None:
            tensors[but] = tensors[but].bfloat16().float()

    logits: list[Tensor] = []
    for other in (Q_PROJ, None):
        rewrite(checkpoint, lambda tensors, other=other: in_bfloat16(tensors, other))
        model = load_model(checkpoint, torch.bfloat16, "cpu", make())
        logits.append(chunked_logits(model, random_tokens(9), [9]))

    assert torch.equal(*logits)


PEAK = """
import sys, torch
from pathlib import Path
from outdraft.kernels.choose import choose_kernels
from outdraft.models.decoder.loader import load_model

def status_bytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

kernels = choose_kernels("auto", torch.device("cpu"), torch.bfloat16)
before = status_bytes("VmRSS")
model = load_model(Path(sys.argv[1]), torch.bfloat16, "cpu", kernels)
print((status_bytes("VmHWM") - before) / model.memory_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of a process")
def test_weights_are_loaded_in_little_more_memory_than_they_take(tmp_path: Path):
    sizes = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 3072}
    path = save(llama(**sizes, num_hidden_layers=6).bfloat16(), tmp_path)

    ran = subprocess.run(
        [sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True
    )

    assert float(ran.stdout) < 1.3


def test_old_rotary_frequencies_and_a_tied_head_are_not_needed(tmp_path: Path):
    path = save(randomised(VARIANTS["llama-tied"]()), tmp_path)
    before = chunked_logits(load(path), random_tokens(5), [5])
    rewrite(
        path,
        lambda tensors: tensors.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
            }
        ),
    )

    assert torch.equal(chunked_logits(load(path), random_tokens(5), [5]), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q_PROJ), f"lacks tensors: {Q_PROJ}"),
        (lambda t: t.pop("lm_head.weight"), "lacks tensors: lm_head.weight"),
        (lambda t: t.update({"model.extra": torch.ones(2)}), "no use for: model.extra"),
        (
            lambda t: t.update({Q_PROJ: torch.ones(32, 16)}),
            rf"'{Q_PROJ}' has shape \[32, 16\], but config.json asks for \[32, 32\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
            "'model.norm.weight' has dtype I8, which is not supported",
        ),
    ],
)
def test_wrong_tensors_are_named(checkpoint: Path, change, message):
    rewrite(checkpoint, change)

    with pytest.raises(ConfigError, match=message):
        load(checkpoint)


def test_a_long_list_of_missing_tensors_is_cut(checkpoint: Path):
    rewrite(checkpoint, lambda tensors: [tensors.pop(n) for n in list(tensors) if ".2." in n])

    with pytest.raises(ConfigError, match=r"model\.layers\.2\..* and 4 more$"):
        load(checkpoint)


@pytest.mark.parametrize("kept", [4, 100, -1])
def test_a_file_that_was_cut_short_is_refused(checkpoint: Path, kept: int):
    content = (checkpoint / SINGLE).read_bytes()
    (checkpoint / SINGLE).write_bytes(content[:kept])

    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged or cut short"):
        load(checkpoint)


def test_pickles_are_refused(checkpoint: Path):
    (checkpoint / SINGLE).rename(checkpoint / "pytorch_model.bin")

    with pytest.raises(ConfigError, match="pickled weights only"):
        load(checkpoint)


def test_a_directory_without_weights_is_refused(checkpoint: Path):
    (checkpoint / SINGLE).unlink()

    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {Q_PROJ: "a.safetensors"}}, "names 'a.safetensors', which is missing"),
        ({"weight_map": {Q_PROJ: "../a.safetensors"}}, "outside of its directory"),
        ({}, "has no weight_map"),
    ],
)
def test_an_index_must_name_files_of_its_directory(checkpoint: Path, index, message):
    (checkpoint / INDEX).write_text(json.dumps(index))

    with pytest.raises(ConfigError, match=message):
        load(checkpoint)


def test_a_tensor_in_two_shards_is_refused(checkpoint: Path):
    save_file({"model.norm.weight": torch.ones(32)}, checkpoint / "more.safetensors")
    weight_map = {"a": SINGLE, "b": "more.safetensors"}
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    with pytest.raises(ConfigError, match=r"twice: model\.norm\.weight$"):
        load(checkpoint)


def test_a_directory_is_its_own_path(checkpoint: Path):
    assert resolve_model_path(checkpoint) == checkpoint
    assert resolve_model_path(str(checkpoint)) == checkpoint


def test_a_path_that_is_no_directory_is_not_looked_for_on_the_hub(checkpoint: Path):
    with pytest.raises(ConfigError, match="is a file: give the directory"):
        resolve_model_path(checkpoint / SINGLE)
    for name in ("/no/such/place", "./nothing", "a/b/c"):
        with pytest.raises(ConfigError, match="there is no such directory"):
            resolve_model_path(name)


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_offline_a_checkpoint_is_taken_from_the_cache(offline_hub: Path):
    repository = offline_hub / "models--someone--tiny"
    revision = "0123456789012345678901234567890123456789"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots" / revision).mkdir(parents=True)
    (repository / "snapshots" / revision / "config.json").write_text("{}")

    assert resolve_model_path("someone/tiny") == repository / "snapshots" / revision


def test_offline_an_unknown_name_is_refused(offline_hub: Path):
    with pytest.raises(ConfigError, match="'someone/nothing' is neither a directory nor"):
        resolve_model_path("someone/nothing")


def test_a_name_that_the_hub_cannot_have_is_refused(offline_hub: Path):
    with pytest.raises(ConfigError, match="is neither a directory nor"):
        resolve_model_path("some one")
