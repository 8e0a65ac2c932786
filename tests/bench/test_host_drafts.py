"""The cost of host drafts is that of the proposers that were configured."""

from itertools import pairwise

import numpy as np
import pytest

from outdraft.bench import side_by_side
from outdraft.bench.side_by_side import (
    HOST_DRAFT_TOKENS,
    draft_us_per_request_32k,
    make_phrases,
    phrases_text,
    time_drafts,
)
from outdraft.config.speculation import DraftNetworkConfig, NgramConfig, SuffixConfig
from outdraft.core.draft import Draft
from tests.kernels.tables import cpu_kernels


def test_a_text_is_made_of_its_phrases():
    rng = np.random.default_rng(0)
    phrases = make_phrases(rng, 400)
    text = phrases_text(rng, phrases, 400)
    assert text.shape == (400,)
    assert text.dtype == np.int32
    pairs = {(a, b) for phrase in phrases for a, b in pairwise(phrase)}
    inside = sum(pair in pairs for pair in pairwise(text))
    assert inside > 0.8 * len(text)


def test_every_step_asks_for_a_longer_text_and_is_timed_a_request():
    asked = []

    def propose(asks):
        asked.append([len(ask.token_ids) for ask in asks])
        assert all(ask.max_tokens == HOST_DRAFT_TOKENS for ask in asks)
        return [Draft.chain([1, 2]) for _ in asks]

    texts = [np.zeros(200, np.int32)] * 3
    found = time_drafts(propose, texts, 50, 4)
    assert len(asked) == len(found["times_us"]) == 5
    assert asked[0] == [50, 50, 50]
    for before, after in pairwise(asked):
        assert all(1 <= b - a <= 5 for a, b in zip(before, after, strict=True))
    assert found["drafted"] == [2.0] * 5


def test_only_sources_of_the_host_have_a_price_there(monkeypatch):
    monkeypatch.setattr(side_by_side, "LONG_CONTEXT", 500)
    monkeypatch.setattr(side_by_side, "HOST_STEPS", 3)
    network = DraftNetworkConfig(model="m")
    assert draft_us_per_request_32k([SuffixConfig(), network], cpu_kernels()) is None
    for sources in ([NgramConfig()], [SuffixConfig()], [NgramConfig(), SuffixConfig()]):
        us = draft_us_per_request_32k(sources, cpu_kernels())
        assert us == pytest.approx(us)
        assert us > 0
