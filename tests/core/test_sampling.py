"""Sampling parameters: every wrong value is refused by the name of its field."""

import math

import pytest

from outdraft.core.errors import RequestError
from outdraft.core.sampling import MAX_INT64, SamplingParams, SpeculationParams

RANGES = {
    "n": (1, 128),
    "temperature": (0.0, 100.0),
    "top_k": (-1, None),
    "top_p": (0.001, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "min_tokens": (0, MAX_INT64),
    "max_tokens": (1, None),
    "logprobs": (0, 100),
    "prompt_logprobs": (0, 100),
    "seed": (-MAX_INT64 - 1, MAX_INT64),
}
WHOLE = ("n", "top_k", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "seed")
OPTIONAL = ("max_tokens", "logprobs", "prompt_logprobs", "seed")
FLAGS = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")


def refused_field(**values) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert caught.value.field in str(caught.value)
    return caught.value.field


@pytest.mark.parametrize("name", RANGES)
def test_both_ends_of_a_range_are_allowed_and_what_lies_outside_is_not(name):
    low, high = RANGES[name]
    assert getattr(SamplingParams(**{name: low}), name) == low
    assert refused_field(**{name: low - 1}) == name
    if high is not None:
        others = {"max_tokens": None} if name == "min_tokens" else {}
        assert getattr(SamplingParams(**others, **{name: high}), name) == high
        assert refused_field(**{name: high + 1}) == name


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("value", ["1", True, [1], math.nan, math.inf])
def test_what_is_no_finite_number_is_refused(name, value):
    assert refused_field(**{name: value}) == name


@pytest.mark.parametrize("name", WHOLE)
def test_a_fraction_is_refused_where_a_whole_number_is_meant(name):
    assert refused_field(**{name: 1.5}) == name


@pytest.mark.parametrize("name", RANGES)
def test_none_is_allowed_exactly_where_it_means_something(name):
    if name in OPTIONAL:
        assert getattr(SamplingParams(**{name: None}), name) is None
    else:
        assert refused_field(**{name: None}) == name


@pytest.mark.parametrize("name", ["top_p", "repetition_penalty"])
def test_zero_is_refused_where_it_would_leave_nothing(name):
    assert refused_field(**{name: 0.0}) == name


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_true_or_false(name):
    assert refused_field(**{name: "yes"}) == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", [""]),
        ("stop", ["a", 5]),
        ("bad_words", "word"),
        ("bad_words", [5]),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["5"]),
        ("stop_token_ids", [True]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.5]),
        ("logit_bias", [(1, 2.0)]),
        ("logit_bias", {1: "2"}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: -100.5}),
        ("logit_bias", {1: math.nan}),
        ("speculation", "off"),
        ("speculation", {"num_speculative_tokens": -1}),
        ("speculation", {"num_speculative_tokens": 2.5}),
        ("speculation", {"num_speculative_tokens": "2"}),
        ("speculation", {"number": 2}),
        ("speculation", {"enabled": "no"}),
        ("speculation", {"trace": 1}),
        ("speculation", {"method": 3}),
        ("prediction", 3),
        ("prediction", [1, "a"]),
    ],
)
def test_wrong_lists_and_mappings_are_refused(name, value):
    assert refused_field(**{name: value}) == name


def test_a_seed_of_minus_one_is_none():
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(seed=-2).seed == -2


def test_stop_may_be_one_text_or_several_but_nothing_else():
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert refused_field(stop=5) == "stop"
    assert refused_field(stop="") == "stop"


def test_stop_strings_need_text():
    assert refused_field(stop="a", detokenize=False) == "stop"


def test_the_fewest_tokens_must_not_exceed_the_most():
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    assert SamplingParams(min_tokens=30, max_tokens=None).min_tokens == 30
    assert refused_field(min_tokens=4, max_tokens=3) == "min_tokens"


def test_a_mapping_gives_the_same_parameters_and_unknown_names_get_a_hint():
    values = {"temperature": 0.5, "speculation": {"enabled": False}}
    params = SamplingParams.from_mapping(values)
    expected = SpeculationParams(enabled=False)
    assert params == SamplingParams(temperature=0.5, speculation=expected)
    with pytest.raises(RequestError, match="did you mean 'temperature'") as caught:
        SamplingParams.from_mapping({"temprature": 0.5})
    assert caught.value.field == "temprature"


def test_greedy_means_temperature_zero():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy
