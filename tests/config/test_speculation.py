"""The JSON form of a speculation configuration."""

import math

import pytest

from outdraft.config.speculation import (
    DraftNetworkConfig,
    NgramConfig,
    SpeculationConfig,
    SuffixConfig,
    parse_speculative_config,
)
from outdraft.core.draft import DraftSource
from outdraft.core.errors import ConfigError


@pytest.mark.parametrize(
    "values",
    [
        {"method": "medusa", "model": "m", "tree_levels": "2,1"},
        {"method": "medusa", "model": "m", "tree_levels": [2, 1.5]},
        {"method": "medusa", "model": "m", "tree_levels": [2, 1], "num_speculative_tokens": 4},
        {"method": "combined", "tree_levels": [2, 2]},
        {"method": "combined", "parallel_drafting": True},
        {"method": "draft_model", "model": "m", "parallel_drafting": "false"},
        {"method": "eagle3", "model": "m", "parallel_drafting": True, "tree_levels": [2, 1]},
        {"method": "medusa", "model": "m", "parallel_drafting": True},
        {"method": "dflash", "model": "m", "parallel_drafting": True},
        {"method": "dspark", "tree_levels": [2, 1]},
        {"method": "draft_model", "model": 5},
        {"method": "draft_model", "model": "m", "kv_budget": 512},
        {"method": "mtp", "model": "m"},
        {"method": "mtp", "parallel_drafting": True},
        {"method": "mtp", "kv_budget": 512},
        {"method": "self"},
        {"method": "self", "quantization": "int5"},
        {"method": "self", "kv_budget": 0},
        {"method": "self", "model": "m", "kv_budget": 512},
        {"method": "self", "kv_budget": 512, "parallel_drafting": True},
        {"method": "ngram", "rejection_sample_method": "lossy_typical", "posterior_alpha": 0},
        {"method": "ngram", "posterior_alpha": 0.2},
        {"sources": []},
        {"sources": [{"method": "ngram"}, {"method": "ngram"}]},
        {"sources": [{"method": "combined"}]},
        {"sources": [{"method": "eagle3", "model": "a"}, {"method": "medusa", "model": "b"}]},
        {"sources": [{"method": "ngram", "model": "m"}]},
        {"sources": [{"method": "ngram"}], "model": "m"},
    ],
)
def test_what_makes_no_sense_is_refused(values):
    with pytest.raises(ConfigError):
        parse_speculative_config(values)


@pytest.mark.parametrize("name", ["mtp", "deepseek_mtp", "glm4_moe_mtp", "mimo_mtp"])
def test_layers_of_the_target_draft_without_a_path_whatever_vllm_calls_them(name: str):
    config = parse_speculative_config({"method": name, "num_speculative_tokens": 3})
    assert config.methods == (DraftSource.MTP,)
    assert config.network is not None
    assert config.network.model == ""


def test_sources_keep_their_order_and_a_tree_brings_its_number_of_rows():
    config = parse_speculative_config(
        {
            "sources": [
                {"method": "ngram", "branching": 2},
                {"method": "suffix"},
                {"method": "eagle3", "model": "m", "tree_levels": [2, 2, 1]},
            ]
        }
    )
    assert [str(method) for method in config.methods] == ["ngram", "suffix", "eagle3"]
    assert config.max_drafts == 5
    assert config.network is not None
    assert config.network.tree is not None
    assert config.network.tree.levels == (2, 2, 1)


def test_no_configuration_is_plain_decoding():
    config = parse_speculative_config(None)
    assert config == SpeculationConfig()
    assert config.sources == ()
    assert config.network is None


@pytest.mark.parametrize(
    ("values", "sources", "most"),
    [
        ({"method": "ngram"}, (NgramConfig(),), 10),
        ({"method": "suffix"}, (SuffixConfig(),), 24),
        ({"method": "combined"}, (SuffixConfig(), NgramConfig()), 24),
        ({"method": "draft_model", "model": "m"}, (DraftNetworkConfig(model="m"),), 7),
        ({"model": "m"}, (DraftNetworkConfig(model="m"),), 7),
        (
            {"method": "combined", "model": "m"},
            (SuffixConfig(), NgramConfig(), DraftNetworkConfig(model="m")),
            7,
        ),
    ],
)
def test_methods_mean_their_sources_with_defaults(values, sources, most):
    config = parse_speculative_config(values)
    assert config == SpeculationConfig(sources=sources)
    assert (config.num_speculative_tokens, config.control) == ("auto", "adaptive")
    assert config.max_drafts == most


@pytest.mark.parametrize("control", [{}, {"control": "fixed"}, {"control": "adaptive"}])
def test_a_number_that_is_given_is_the_maximum_whatever_controls(control):
    config = parse_speculative_config({"model": "m", "num_speculative_tokens": 3, **control})
    assert config.max_drafts == 3
    assert config.control == control.get("control", "adaptive")
    auto = parse_speculative_config({"model": "m", "num_speculative_tokens": "auto", **control})
    assert auto.max_drafts == 7


def test_every_key_arrives_where_it_belongs():
    config = parse_speculative_config(
        {
            "method": "combined",
            "model": "m",
            "max_model_len": 512,
            "draft_sample_method": "greedy",
            "min_vocabulary_overlap": 0.25,
            "quantization": "int8",
            "prompt_lookup_min": 3,
            "prompt_lookup_max": 4,
            "branching": 3,
            "suffix_decoding_max_tree_depth": 12,
            "suffix_decoding_max_cached_requests": 0,
            "suffix_decoding_max_spec_factor": 2,
            "suffix_decoding_min_token_prob": 0.5,
            "num_speculative_tokens": 7,
            "rejection_sample_method": "token",
            "disable_by_batch_size": 9,
        }
    )
    assert config == SpeculationConfig(
        sources=(
            SuffixConfig(
                suffix_decoding_max_tree_depth=12,
                suffix_decoding_max_cached_requests=0,
                suffix_decoding_max_spec_factor=2,
                suffix_decoding_min_token_prob=0.5,
                branching=3,
            ),
            NgramConfig(prompt_lookup_min=3, prompt_lookup_max=4, branching=3),
            DraftNetworkConfig(
                model="m",
                max_model_len=512,
                draft_sample_method="greedy",
                min_vocabulary_overlap=0.25,
                quantization="int8",
            ),
        ),
        num_speculative_tokens=7,
        rejection_sample_method="token",
        disable_by_batch_size=9,
    )
    assert config.methods == (DraftSource.SUFFIX, DraftSource.NGRAM, DraftSource.MODEL)
    assert config.network == config.sources[2]


def test_dashes_are_underscores():
    dashed = parse_speculative_config({"method": "ngram", "num-speculative-tokens": 3})
    assert dashed == parse_speculative_config({"method": "ngram", "num_speculative_tokens": 3})


@pytest.mark.parametrize("key", ["prompt_lookup_min", "prompt_lookup_max"])
def test_one_lookup_bound_stands_for_both(key):
    [ngram] = parse_speculative_config({"method": "ngram", key: 3}).sources
    assert ngram == NgramConfig(prompt_lookup_min=3, prompt_lookup_max=3)


def test_branching_leaves_the_lookup_bounds_as_they_are():
    [ngram] = parse_speculative_config({"method": "ngram", "branching": 2}).sources
    assert ngram == NgramConfig(branching=2)


@pytest.mark.parametrize("method", ["ngram", "suffix", "combined", None])
def test_null_stands_for_the_default(method):
    keys = ["model", "num_speculative_tokens", "suffix_decoding_max_tree_depth"]
    nulls = dict.fromkeys([*keys, "prompt_lookup_max", "disable_by_batch_size"])
    given = {"method": method} if method else {"model": "m", "method": None}
    assert parse_speculative_config({**nulls, **given}) == parse_speculative_config(given)


@pytest.mark.parametrize(("depth", "number"), [(10, 10), (63, 63), (64, 63), (500, 63)])
def test_suffix_decoding_drafts_as_deep_as_its_tree_if_a_draft_can(depth, number):
    config = parse_speculative_config({"method": "suffix", "suffix_decoding_max_tree_depth": depth})
    assert config.max_drafts == number


def test_an_unknown_key_gets_a_hint():
    with pytest.raises(ConfigError, match="did you mean 'num_speculative_tokens'"):
        parse_speculative_config({"method": "ngram", "num-speculativ-tokens": 3})


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("ngram", "model"),
        ("ngram", "suffix_decoding_max_tree_depth"),
        ("suffix", "prompt_lookup_max"),
        ("suffix", "draft_sample_method"),
        ("draft_model", "prompt_lookup_min"),
        ("draft_model", "branching"),
    ],
)
def test_a_key_without_meaning_for_the_method_is_refused(method, key):
    model = {"model": "m"} if method == "draft_model" else {}
    with pytest.raises(ConfigError, match=f"{key}.*{method}"):
        parse_speculative_config({**model, "method": method, key: 3})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "method"),
        ({"method": "eagle9"}, "eagle9"),
        ({"method": ["ngram"]}, "method"),
        ({"method": "draft_model"}, "model"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 64}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": "automatic"}, "num_speculative_tokens"),
        ({"method": "ngram", "control": "none"}, "control"),
        ({"method": "ngram", "control": True}, "control"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max must be at least 1"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min must be at least 1"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_max"),
        ({"method": "ngram", "branching": 0}, "branching"),
        ({"method": "suffix", "branching": 64}, "branching"),
        ({"method": "ngram", "rejection_sample_method": "typical"}, "rejection_sample_method"),
        ({"method": "ngram", "disable_by_batch_size": 0}, "disable_by_batch_size"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, "max_tree_depth"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "max_cached_requests"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": math.nan}, "max_spec_factor"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": "2"}, "max_spec_factor"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "min_token_prob"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": math.nan}, "min_token_prob"),
        ({"model": "m", "max_model_len": 0}, "max_model_len"),
        ({"model": "m", "draft_sample_method": "beam"}, "draft_sample_method"),
        ({"model": "m", "min_vocabulary_overlap": 1.5}, "min_vocabulary_overlap"),
        ({"model": "m", "quantization": "int5"}, "quantization"),
        ({"model": "m", "min_vocabulary_overlap": math.nan}, "min_vocabulary_overlap"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_key(values, named):
    with pytest.raises(ConfigError, match=named):
        parse_speculative_config(values)
