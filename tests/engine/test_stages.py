"""A start says what it does and how long that takes."""

import re

import pytest

from outdraft import LLM, assets
from outdraft.loading.models import stage


def test_a_start_names_its_stages_with_seconds(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger="outdraft"):
        LLM(str(assets.target_path()), kv_cache_memory_bytes=16 << 20)
    lines = "\n".join(caplog.messages)
    for name in ("loaded the weights of .*", "loaded the tokenizer", "planned the memory"):
        assert re.search(rf"^{name}: \d+\.\d\d s$", lines, re.MULTILINE), name


def test_a_stage_that_fails_is_not_said_to_be_done(caplog: pytest.LogCaptureFixture):
    with (
        caplog.at_level("INFO", logger="outdraft"),
        pytest.raises(ZeroDivisionError),
        stage("divided"),
    ):
        _ = 1 / 0
    assert not caplog.messages
