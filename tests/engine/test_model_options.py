"""Options of a model: where it comes from, in what form, and how it wants to be sampled."""

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from outdraft import LLM, SamplingParams
from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError
from outdraft.loading import models as loading
from outdraft.loading.models import choose_dtype
from outdraft.models.checkpoints.config_json import default_sampling
from outdraft.models.checkpoints.files import resolve_model_path
from outdraft.ranks.launch import load_on_ranks
from tests.cli.pair import pair

OWN = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
SMALL = {"dtype": "float32", "device": "cpu", "num_blocks": 64}


def written(folder: Path, **values) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def defaults(folder: Path, choice: str = "auto") -> dict:
    return default_sampling(EngineConfig(model="m", generation_config=choice), folder)


def test_the_models_own_file_says_how_it_is_sampled(tmp_path):
    others = {"eos_token_id": [1, 2], "do_sample": True, "min_p": None, "max_new_tokens": 512}
    assert defaults(written(tmp_path, **OWN, **others)) == OWN | {"max_tokens": 512}


def test_without_a_file_or_with_vllms_defaults_nothing_is_said(tmp_path):
    assert defaults(tmp_path) == {}
    assert defaults(written(tmp_path, **OWN), "vllm") == {}


def test_another_directory_may_say_it(tmp_path):
    other = written(tmp_path / "other", temperature=0.1)
    assert defaults(written(tmp_path, **OWN), str(other)) == {"temperature": 0.1}


def test_a_file_that_is_missing_or_wrong_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"auto, vllm or a directory .* 'nowhere'"):
        defaults(tmp_path, "nowhere")
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature must be"):
        defaults(written(tmp_path, temperature=-1))


def test_a_call_without_parameters_is_sampled_as_the_model_wants(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(pair().target, model)
    written(model, temperature=0.0, max_new_tokens=5)
    llm = LLM(str(model), **SMALL)
    want = SamplingParams(temperature=0.0, max_tokens=5)
    assert llm.get_default_sampling_params() == want
    [output] = llm.generate("def add(", use_tqdm=False)
    [asked] = llm.generate("def add(", want, use_tqdm=False)
    assert output.outputs[0].token_ids == asked.outputs[0].token_ids
    assert len(output.outputs[0].token_ids) == 5


def test_dummy_weights_need_no_files_and_are_the_same_every_time(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(pair().target, model, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ConfigError, match="safetensors"):
        LLM(str(model), **SMALL)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = [
        LLM(str(model), load_format="dummy", **SMALL).generate("def add(", params, use_tqdm=False)
        for _ in range(2)
    ]
    first, second = (output.outputs[0].token_ids for [output] in outputs)
    assert first == second
    assert len(first) == 8


def test_a_network_cannot_draft_for_dummy_weights():
    network = {"method": "draft_model", "model": str(pair().drafter)}
    with pytest.raises(ConfigError, match="load_format 'dummy'"):
        LLM(str(pair().target), load_format="dummy", speculative_config=network, **SMALL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_config": "/nowhere"}, "generation_config must be"),
        ({"tokenizer": "/nowhere"}, "no such directory"),
        ({"speculative_config": {"method": "draft_model", "model": "/nowhere"}}, "no such dir"),
        ({"speculative_config": {"method": "eagle3", "model": "/nowhere"}}, "no such dir"),
        (
            {"speculative_config": {"method": "eagle3", "model": "/x"}, "load_format": "dummy"},
            "load_format",
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_missing_is_found_before_weights_are_read(monkeypatch, options, message, size):
    def must_not_load(*args, **kwargs):
        raise AssertionError("weights are read")

    monkeypatch.setattr(loading, "load_language_model", must_not_load)
    config = EngineConfig.from_options(
        model=str(pair().target), device="cpu", tensor_parallel_size=size, **options
    )
    with pytest.raises(ConfigError, match=message):
        load_on_ranks(config)


def test_a_revision_of_a_directory_is_refused():
    with pytest.raises(ConfigError, match="revision 'v2' is for models of the hub"):
        LLM(str(pair().target), revision="v2", **SMALL)


def test_a_revision_is_found_in_the_hubs_cache(tmp_path, monkeypatch):
    """The layout that the hub's library writes: a commit for each name of a revision."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    for name, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (repository / "refs" / name).write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
    assert resolve_model_path("some/model").name == "a" * 40
    assert resolve_model_path("some/model", "v2").name == "b" * 40
    with pytest.raises(ConfigError, match="some/model"):
        resolve_model_path("some/model", "v3")


def test_dummy_weights_are_not_downloaded(tmp_path, monkeypatch):
    asked = []

    def snapshot_download(name, **options) -> str:
        asked.append((name, options["revision"], "*.safetensors" in options["ignore_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    resolve_model_path("some/model", "v2", with_weights=False)
    resolve_model_path("some/model")
    assert asked == [("some/model", "v2", True), ("some/model", None, False)]


def test_of_another_tokenizer_no_weights_are_downloaded(tmp_path, monkeypatch):
    asked = []

    def snapshot_download(name, **options) -> str:
        asked.append((name, "*.safetensors" in options["ignore_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    config = EngineConfig(model="m", tokenizer="some/tokenizer")
    assert loading.tokenizer_path(config, tmp_path / "model") == tmp_path
    assert asked == [("some/tokenizer", True)]


@pytest.mark.parametrize(("name", "dtype"), [("half", torch.float16), ("float", torch.float32)])
def test_a_dtype_may_have_vllms_other_name(name, dtype):
    assert EngineConfig(model="m", dtype=name).dtype == name
    assert choose_dtype(name, "bfloat16", torch.device("cpu")) is dtype


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_scripts_may_ask_for_eager_steps(enforce_eager):
    config = EngineConfig.from_options(model="m", enforce_eager=enforce_eager)
    assert config.enforce_eager is enforce_eager
