"""Requests of a benchmark, and their times.

Prompts are drawn without repetition for as long as the data lasts: one that comes again is found in
the prefix cache and in the memory of the suffix proposer, which would flatter both.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from tokenizers import Tokenizer

from outdraft import assets
from outdraft.config.benchmarks import DEFAULT_OUTPUT_LEN, Dataset, TrafficPlan
from outdraft.config.fields import read_text
from outdraft.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One prompt, as text or as token ids, and what is asked for."""

    prompt: str | tuple[int, ...]
    max_tokens: Annotated[int, Meta(ge=1)] = DEFAULT_OUTPUT_LEN
    prediction: str | None = None  # sent as the expected output


def load_requests(
    dataset: Dataset, count: int, seed: int, tokenizer: Tokenizer | None = None
) -> list[BenchRequest]:
    """`count` requests in an order that the seed decides; they repeat only when all were used.

    Args:
        tokenizer: the model's; random prompts need its vocabulary, ShareGPT the lengths of answers.

    Raises:
        ConfigError: the data cannot be read, or a tokenizer is missing.
    """
    rng = np.random.default_rng(seed)
    if dataset.name == "random":
        return _random_requests(dataset, count, rng, tokenizer)
    if dataset.path is None:
        length = dataset.output_len or DEFAULT_OUTPUT_LEN
        found = [BenchRequest(text, length) for _, text in assets.prompts()]
    else:
        text = read_text(dataset.path, f"dataset {dataset.path}")
        is_custom = dataset.name == "custom"
        found = list(_custom(text, dataset) if is_custom else _sharegpt(text, dataset, tokenizer))
    if not found:
        raise ConfigError(f"dataset {dataset.path or dataset.name} holds no prompts")
    order = rng.permutation(len(found)).tolist()
    return [found[order[i % len(order)]] for i in range(count)]


def load_tokenizer(name: str) -> Tokenizer:
    """From a directory, or by its name on the hub. Raises ConfigError if there is none."""
    path = Path(name) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path)) if path.exists() else Tokenizer.from_pretrained(name)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ConfigError(f"tokenizer {name!r} cannot be loaded: {error}") from None


def num_distinct_prompts(requests: Iterable[BenchRequest]) -> int:
    """Count the prompts that differ."""
    return len({request.prompt for request in requests})


def repetition_notes(num_distinct: int, num_prompts: int) -> list[str]:
    """A note for readers if prompts came again."""
    if num_distinct == num_prompts:
        return []
    return [
        f"only {num_distinct} of {num_prompts} prompts differ: caches of prompts, and drafts from "
        "earlier answers, make repeated ones faster"
    ]


def arrival_times(count: int, traffic: TrafficPlan) -> list[float]:
    """Draw the times at which requests are due, in seconds from the start, ascending.

    Gaps are gamma distributed with shape `burstiness` and mean 1 / rate: a Poisson process for 1,
    bursts below, even gaps in the limit of infinity. They are scaled, as in vLLM, so that the last
    request is due at count / rate whatever the seed. An infinite rate is everything at once.
    """
    request_rate, burstiness = traffic.request_rate, traffic.burstiness
    rng = np.random.default_rng(traffic.seed)
    if math.isinf(request_rate):
        return [0.0] * count
    gaps = np.ones(count) if math.isinf(burstiness) else rng.gamma(burstiness, size=count)
    times = np.cumsum(gaps)
    if times[-1] == 0:  # tiny shapes underflow: no gap is left to scale
        return [count / request_rate] * count
    return (times * (count / request_rate / times[-1])).tolist()


def _random_requests(
    dataset: Dataset, count: int, rng: np.random.Generator, tokenizer: Tokenizer | None
) -> list[BenchRequest]:
    """Ids that are even over the vocabulary without its special tokens."""
    if tokenizer is None:
        raise ConfigError("random prompts need --tokenizer: it says which token ids exist")
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    ids = np.array([i for i in range(tokenizer.get_vocab_size()) if i not in special])

    def length(mean: int) -> int:
        low, high = mean * (1 - dataset.range_ratio), mean * (1 + dataset.range_ratio)
        return int(rng.integers(max(1, math.floor(low)), math.ceil(high), endpoint=True))

    output_len = dataset.output_len or DEFAULT_OUTPUT_LEN
    return [
        BenchRequest(tuple(rng.choice(ids, length(dataset.input_len)).tolist()), length(output_len))
        for _ in range(count)
    ]


def _custom(text: str, dataset: Dataset) -> Iterator[BenchRequest]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            request = msgspec.json.decode(line, type=BenchRequest)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{dataset.path}, line {number}: {error}") from None
        yield replace(request, max_tokens=dataset.output_len or request.max_tokens)


def _sharegpt(text: str, dataset: Dataset, tokenizer: Tokenizer | None) -> Iterator[BenchRequest]:
    """The first message of each conversation, and as many tokens as its recorded answer has."""
    if dataset.output_len is None and tokenizer is None:
        raise ConfigError(
            "sharegpt needs --output-len, or --tokenizer to measure the recorded answers"
        )
    try:
        talks = [entry["conversations"] for entry in json.loads(text)]
        pairs = [(talk[0]["value"], talk[1]["value"]) for talk in talks if len(talk) > 1]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{dataset.path}: no list of ShareGPT conversations: {error!r}") from None
    for prompt, answer in pairs:
        length = dataset.output_len
        if length is None:
            assert tokenizer is not None
            length = len(tokenizer.encode(answer, add_special_tokens=False).ids)
        yield BenchRequest(prompt, max(1, length))
