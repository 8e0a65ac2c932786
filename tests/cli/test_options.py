"""Flags are the fields of the configuration, and wrong values are refused by name."""

import dataclasses
import json

import pytest

from outdraft import assets
from outdraft.cli.options import (
    DEFAULT_MAX_TOKENS,
    EngineOptions,
    SamplingOptions,
    SchedulerOptions,
    documented,
    engine_config,
    sampling_params,
    speculative_config,
)
from outdraft.config.engine import DTYPES, LOAD_FORMATS, MODEL_IMPLS, POLICIES, EngineConfig
from outdraft.config.speculation import DraftNetworkConfig, parse_speculative_config
from outdraft.core.draft import DraftSource
from outdraft.core.errors import ConfigError, RequestError
from outdraft.core.sampling import SamplingParams
from outdraft.core.weights import QUANTIZATIONS


def serving_of(model, options):
    return engine_config(model, options, SchedulerOptions())


def test_flags_that_are_not_given_leave_the_defaults_alone():
    config = engine_config("some/model", EngineOptions())
    assert config == EngineConfig.from_options(model="some/model", max_num_seqs=1)
    assert sampling_params(SamplingOptions()) == SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)


def test_every_sampling_flag_reaches_the_parameters():
    values = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "stop": ["a"],
        "ignore_eos": True,
    }
    assert set(values) == {field.name for field in dataclasses.fields(SamplingOptions)}
    assert sampling_params(SamplingOptions(**values)) == SamplingParams(**values)


def test_every_engine_flag_reaches_the_configuration():
    values = {
        "revision": "v2",
        "load_format": "dummy",
        "model_impl": "transformers",
        "generation_config": "vllm",
        "gpu_memory_utilization": 0.25,
        "enforce_eager": True,
        "tokenizer": "t",
        "dtype": "float64",
        "device": "cpu",
        "max_model_len": 77,
        "block_size": 8,
        "enable_prefix_caching": False,
        "kernels": "reference",
        "quantization": "int4-g32",
        "activation_dtype": "float",
        "cost_table": "roofline",
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "ray",
        "rank_timeout_s": 4.5,
        "check_ranks": True,
        "seed": 0,
    }
    written = {"kv_cache_memory_bytes": "1Mi", "speculative_config": '{"method": "suffix"}'}
    read = {"kv_cache_memory_bytes": 2**20, "speculative_config": {"method": "suffix"}}
    assert {*values, *written} == {field.name for field in dataclasses.fields(EngineOptions)}
    expected = EngineConfig.from_options(model="m", max_num_seqs=1, **values, **read)
    assert engine_config("m", EngineOptions(**values, **written)) == expected


@pytest.mark.parametrize(
    ("group", "name", "choices"),
    [
        (EngineOptions, "load_format", LOAD_FORMATS),
        (EngineOptions, "model_impl", MODEL_IMPLS),
        (EngineOptions, "dtype", DTYPES),
        (EngineOptions, "quantization", QUANTIZATIONS),
        (SchedulerOptions, "scheduling_policy", POLICIES),
    ],
)
def test_help_names_all_choices(group, name, choices):
    assert ", ".join(choices) in documented(group)[name][1]


def test_every_flag_of_an_engine_has_a_help():
    for group in (EngineOptions, SchedulerOptions):
        assert set(documented(group)) == {field.name for field in dataclasses.fields(group)}


def test_sampling_flags_win_over_the_models_own_defaults():
    defaults = SamplingParams(temperature=0.6, top_k=20)
    chosen = sampling_params(SamplingOptions(temperature=0.1), defaults)
    assert chosen == SamplingParams(temperature=0.1, top_k=20, max_tokens=DEFAULT_MAX_TOKENS)


@pytest.mark.usefixtures("embedded")
def test_the_embedded_model_drafts_with_everything_unless_told_otherwise():
    speculation = engine_config(None, EngineOptions()).speculation
    assert speculation.methods == (DraftSource.SUFFIX, DraftSource.NGRAM, DraftSource.MODEL)
    plain = engine_config(None, EngineOptions(speculative_config="null")).speculation
    assert plain == parse_speculative_config(None)


@pytest.mark.usefixtures("embedded")
def test_a_draft_model_beside_the_embedded_target_is_the_embedded_one_or_the_one_named(pair):
    chosen = EngineOptions(speculative_config='{"method": "draft_model"}')
    found = engine_config(None, chosen).speculation.network
    assert isinstance(found, DraftNetworkConfig)
    assert found.model.endswith("drafter")
    named = EngineOptions(speculative_config='{"method": "draft_model", "model": "other"}')
    assert engine_config(None, named).speculation.network == DraftNetworkConfig(model="other")
    lookup = EngineOptions(speculative_config='{"method": "ngram"}')
    assert engine_config(None, lookup).speculation.methods == (DraftSource.NGRAM,)


@pytest.mark.usefixtures("embedded_heads")
@pytest.mark.parametrize("method", assets.HEADS)
@pytest.mark.parametrize("config", [engine_config, serving_of])
def test_a_method_with_a_head_beside_the_embedded_target_brings_it(config, method):
    for more in ({}, {"model": None}):
        chosen = EngineOptions(speculative_config=json.dumps({"method": method, **more}))
        network = config(None, chosen).speculation.network
        assert network == DraftNetworkConfig(
            model=str(assets.head_path(method)), source=DraftSource(method)
        )
    named = EngineOptions(speculative_config=json.dumps({"method": method, "model": "other"}))
    assert config(None, named).speculation.network.model == "other"


@pytest.mark.usefixtures("embedded_heads")
def test_the_embedded_networks_of_a_list_of_sources_are_brought_one_by_one():
    text = '{"sources": [{"method": "medusa"}, {"method": "suffix"}]}'
    speculation = engine_config(None, EngineOptions(speculative_config=text)).speculation
    assert speculation.methods == (DraftSource.MEDUSA, DraftSource.SUFFIX)
    assert speculation.network.model == str(assets.head_path("medusa"))


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize("method", assets.HEADS)
def test_a_head_that_the_package_has_not_is_refused_by_name(method):
    chosen = EngineOptions(speculative_config=json.dumps({"method": method}))
    with pytest.raises(ConfigError, match=f"no embedded {method}: recipes/draft_heads makes it"):
        engine_config(None, chosen)


def test_another_target_gets_no_head_of_the_embedded_one():
    chosen = EngineOptions(speculative_config='{"method": "eagle3"}')
    with pytest.raises(ConfigError, match="needs a model"):
        engine_config("some/model", chosen)


@pytest.mark.parametrize("text", ["{", "[]", "3", '"suffix"'])
def test_a_speculative_config_that_is_no_object_is_refused(text):
    with pytest.raises(ConfigError, match="--speculative-config"):
        speculative_config(text, "m")


def test_a_sampling_value_out_of_range_names_its_parameter():
    with pytest.raises(RequestError) as caught:
        sampling_params(SamplingOptions(top_p=2.0))
    assert caught.value.field == "top_p"
