"""Prompts come as the data say, arrivals as the rate says."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outdraft import assets
from outdraft.bench.workloads import (
    BenchRequest,
    Dataset,
    TrafficPlan,
    arrival_times,
    load_requests,
    load_tokenizer,
    num_distinct_prompts,
)
from outdraft.core.errors import ConfigError
from tests.cli.pair import pair


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(pair().target))


def arrivals(count, rate, burstiness=1.0, seed=0):
    return arrival_times(count, TrafficPlan(request_rate=rate, burstiness=burstiness, seed=seed))


@given(st.integers(1, 60), st.floats(0.01, 1e4), st.floats(0.001, 50) | st.just(math.inf))
def test_arrivals_ascend_and_end_at_count_over_rate(count, rate, burstiness):
    times = arrivals(count, rate, burstiness)
    assert len(times) == count
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] == pytest.approx(count / rate)


def test_without_a_rate_everything_is_due_at_once():
    assert arrivals(3, math.inf) == [0.0, 0.0, 0.0]


def test_endless_burstiness_is_an_even_rhythm():
    assert arrivals(4, 2.0, math.inf) == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("shape", [0.3, 1.0, 4.0])
def test_gaps_are_gamma_distributed_with_the_burstiness_as_shape(shape):
    gaps = np.diff(arrivals(4000, 8.0, shape))
    wanted = stats.gamma(shape, scale=1 / (8.0 * shape))
    assert stats.kstest(gaps, wanted.cdf).pvalue > 0.01
    others = stats.gamma(shape * 1.3, scale=1 / (8.0 * shape * 1.3))
    assert stats.kstest(gaps, others.cdf).pvalue < 1e-4  # the test could have failed


def test_arrivals_are_the_seeds():
    assert arrivals(9, 2.0) == arrivals(9, 2.0)
    assert arrivals(9, 2.0) != arrivals(9, 2.0, seed=1)


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0)])
def test_a_rate_that_is_none_is_refused(rate, burstiness):
    with pytest.raises(ConfigError, match="above 0"):
        arrivals(3, rate, burstiness)


def test_embedded_prompts_repeat_only_when_all_were_used():
    count = len(assets.prompts())
    requests = load_requests(Dataset(output_len=9), count, seed=3)
    assert num_distinct_prompts(requests) == count
    assert {request.max_tokens for request in requests} == {9}
    again = load_requests(Dataset(output_len=9), count + 6, seed=3)
    assert again[:count] == requests
    assert again[count:] == requests[:6]
    assert load_requests(Dataset(output_len=9), count, seed=4) != requests


def test_a_jsonl_line_is_a_request(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "a"},
        {"prompt": "b", "max_tokens": 7, "other": 1},
        {"prompt": "c", "prediction": "cd"},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    found = load_requests(Dataset(name="custom", path=path), 3, seed=0)
    assert sorted(found, key=lambda request: request.prompt) == [
        BenchRequest("a", 128),
        BenchRequest("b", 7),
        BenchRequest("c", 128, "cd"),
    ]
    fixed = load_requests(Dataset(name="custom", path=path, output_len=2), 3, seed=0)
    assert {request.max_tokens for request in fixed} == {2}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"prompt": "a"}\n{"prompt": 3}', r"line 2: Expected `str.* got `int`.*\.prompt"),
        ("nonsense", "line 1: JSON is malformed"),
        ('{"prompt": "a", "max_tokens": 0}', r"line 1: Expected `int` >= 1.*\.max_tokens"),
        ('{"prompt": "a", "prediction": 1}', r"line 1: Expected `str.*\.prediction"),
        ("", "holds no prompts"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, complaint):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load_requests(Dataset(name="custom", path=path), 3, seed=0)


def test_sharegpt_gives_first_messages_and_the_lengths_of_their_answers(tmp_path, tokenizer):
    path = tmp_path / "sharegpt.json"

    def turns(*texts):
        return {"conversations": [{"from": "x", "value": text} for text in texts]}

    path.write_text(json.dumps([turns("def", "return left + right", "more"), turns("alone")]))
    requests = load_requests(Dataset(name="sharegpt", path=path), 2, 0, tokenizer)
    length = len(tokenizer.encode("return left + right").ids)
    assert requests == [BenchRequest("def", length)] * 2
    fixed = load_requests(Dataset(name="sharegpt", path=path, output_len=4), 1, 0)
    assert fixed == [BenchRequest("def", 4)]
    with pytest.raises(ConfigError, match="--output-len"):
        load_requests(Dataset(name="sharegpt", path=path), 1, 0)
    path.write_text('[{"no": 1}]')
    with pytest.raises(ConfigError, match="ShareGPT"):
        load_requests(Dataset(name="sharegpt", path=path, output_len=4), 1, 0)


def test_random_prompts_have_the_lengths_asked_for_and_no_special_tokens(tokenizer):
    dataset = Dataset(name="random", input_len=20, output_len=10, range_ratio=0.5)
    requests = load_requests(dataset, 300, 0, tokenizer)
    assert {len(request.prompt) for request in requests} == set(range(10, 31))
    assert {request.max_tokens for request in requests} == set(range(5, 16))
    ids = {token_id for request in requests for token_id in request.prompt}
    special = [tokenizer.token_to_id(name) for name in ("<begin>", "<end>")]
    assert max(ids) < tokenizer.get_vocab_size()
    special_added = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    assert not ids & special_added
    assert None not in special
    assert num_distinct_prompts(requests) == 300
    exact = load_requests(Dataset(name="random", input_len=20), 5, 0, tokenizer)
    assert {len(request.prompt) for request in exact} == {20}


def test_random_prompts_need_a_vocabulary():
    with pytest.raises(ConfigError, match="--tokenizer"):
        load_requests(Dataset(name="random"), 1, 0)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"name": "sonnet"}, "one of embedded"),
        ({"name": "custom"}, "needs --dataset-path"),
        ({"name": "random", "path": "x"}, "takes no --dataset-path"),
        ({"range_ratio": 1.0}, "range_ratio"),
        ({"output_len": 0}, "at least 1"),
    ],
)
def test_contradictory_options_are_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Dataset(**options)


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path / "none"))
