"""The engine's configuration from flat options."""

import dataclasses
import math

import pytest

from outdraft.config.engine import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from outdraft.config.fields import parse_bytes
from outdraft.config.speculation import parse_speculative_config
from outdraft.core.errors import ConfigError


def test_options_go_to_the_part_that_owns_them():
    config = EngineConfig.from_options(
        model="m",
        seed=5,
        block_size=8,
        enable_prefix_caching=False,
        max_num_seqs=3,
        scheduling_policy="priority",
        tensor_parallel_size=4,
        speculative_config={"method": "ngram"},
    )
    assert config == EngineConfig(
        model="m",
        seed=5,
        cache=CacheConfig(block_size=8, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=3, scheduling_policy="priority"),
        parallel=ParallelConfig(tensor_parallel_size=4),
        speculation=parse_speculative_config({"method": "ngram"}),
    )


def test_no_options_are_the_defaults():
    assert EngineConfig.from_options(model="m") == EngineConfig(model="m")


@pytest.mark.parametrize(
    ("name", "hint"), [("max_num_seq", "max_num_seqs"), ("blocksize", "block_size")]
)
def test_an_unknown_option_gets_a_hint(name, hint):
    with pytest.raises(ConfigError, match=f"{name}.*did you mean '{hint}'"):
        EngineConfig.from_options(model="m", **{name: 1})


@pytest.mark.parametrize("part", ["cache", "scheduler", "speculation", "parallel"])
def test_parts_are_no_flat_options(part):
    with pytest.raises(ConfigError, match=part):
        EngineConfig.from_options(model="m", **{part: None})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("block_size", 2.5),
        ("block_size", "16"),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", math.nan),
        ("load_format", "gguf"),
        ("load_format", "pt"),
        ("enforce_eager", "yes"),
        ("kv_cache_memory_bytes", 0),
        ("num_blocks", 0),
        ("num_blocks", 1.5),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_waiting", 0),
        ("policy", "random"),
        ("scheduling_policy", "random"),
        ("dtype", "int8"),
        ("max_model_len", 1),
        ("tensor_parallel_size", 0),
        ("tensor_parallel_size", "2"),
        ("rank_timeout_s", 0),
        ("rank_timeout_s", float("inf")),
        ("distributed_executor_backend", "ssh"),
        ("check_ranks", 1),
        ("enable_prefix_caching", "yes"),
        ("seed", "x"),
        ("seed", -1),
        ("tokenizer", 5),
        ("speculative_config", "ngram"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_option(name, value):
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_options(model="m", **{name: value})


@pytest.mark.parametrize("model", [None, "", 5])
def test_a_model_is_a_directory_or_a_name(model):
    with pytest.raises(ConfigError, match="model must be a directory or a name"):
        EngineConfig.from_options(model=model)


def test_every_running_request_needs_a_row():
    SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(7\).*max_num_seqs \(8\)"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig(model="m").seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("256Mi", 256 * 2**20),
        ("256MiB", 256 * 2**20),
        ("1.5G", 1_500_000_000),
        ("2gi", 2**31),
        (" 3k ", 3000),
    ],
)
def test_sizes_may_have_decimal_and_binary_units(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "many", "3X", "1.2.3", "-5M", "G"])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="no number of bytes"):
        parse_bytes(text)


def test_a_size_may_be_a_text_in_python_too():
    config = EngineConfig.from_options(model="m", kv_cache_memory_bytes="8Mi")
    assert config.cache.kv_cache_memory_bytes == 8 * 2**20
    with pytest.raises(ConfigError, match="no number of bytes"):
        EngineConfig.from_options(model="m", kv_cache_memory_bytes="much")


def drafting(draft_size):
    return {"model": "d", "draft_tensor_parallel_size": draft_size}


@pytest.mark.parametrize("draft_size", [1, 2, 3, 6])
def test_a_drafter_may_be_shared_by_any_divisor_of_the_ranks(draft_size):
    config = EngineConfig.from_options(
        model="m", tensor_parallel_size=6, speculative_config=drafting(draft_size)
    )
    assert config.draft_tensor_parallel_size == draft_size


@pytest.mark.parametrize(("size", "draft_size", "allowed"), [(6, 4, "1, 2, 3, 6"), (1, 2, "1")])
def test_draft_groups_of_other_sizes_are_refused_with_what_is_allowed(size, draft_size, allowed):
    with pytest.raises(ConfigError, match=rf"draft_tensor_parallel_size.* one of {allowed}, got"):
        EngineConfig.from_options(
            model="m", tensor_parallel_size=size, speculative_config=drafting(draft_size)
        )


def test_each_rank_has_a_gpu_of_its_own():
    with pytest.raises(ConfigError, match=r"device must be.*'cuda:1'"):
        EngineConfig.from_options(model="m", tensor_parallel_size=2, device="cuda:1")
