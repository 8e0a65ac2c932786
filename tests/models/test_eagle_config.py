"""What config.json of an EAGLE drafter may say; the layouts that are read are in test_eagle.py."""

import re
from typing import Any

import pytest

from outdraft.core.errors import ConfigError
from outdraft.models.drafters.config import EagleConfig
from tests.models.eagle_checkpoints import LAYOUTS

TAPS = "eagle_aux_hidden_state_layer_ids"


def test_default_taps_need_a_target_of_three_layers():
    config = EagleConfig.from_mapping(LAYOUTS["eagle3"].config)

    assert config.taps_of(32) == (2, 16, 29)
    with pytest.raises(ConfigError, match=re.escape("behind layers [2, 1, -1]")):
        config.taps_of(2)


@pytest.mark.parametrize(
    ("written", "taps"),
    [
        ({"eagle_config": {TAPS: [1, 15, 28]}}, (2, 16, 29)),  # SpecForge: named from 0 on
        ({"eagle_config": {TAPS: [2, 16, 29]}}, (2, 16, 29)),
        ({"eagle_config": {TAPS: [1, 16, 32]}}, (1, 16, 32)),  # there is no layer 32
        ({TAPS: [1, 15, 28]}, (1, 15, 28)),  # counted, as vLLM does
        ({"eagle_config": {TAPS: [1, 15, 28]}, TAPS: [3, 4, 5]}, (3, 4, 5)),
    ],
)
def test_taps_are_counted_or_named_from_zero(written: dict[str, Any], taps: tuple[int, ...]):
    config = EagleConfig.from_mapping(LAYOUTS["eagle3"].config | written)

    assert config.taps_of(32) == taps


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("eagle3", {"architectures": ["GPT2LMHeadModel"]}, "is not an EAGLE drafter"),
        ("eagle3", {"architectures": []}, "must name one architecture"),
        ("eagle3-speculators", {"speculators_model_type": "eagl3"}, "did you mean 'eagle3'"),
        ("eagle3-speculators", {"norm_before_residual": None}, "norm_before_residual is missing"),
        ("eagle3-speculators", {"transformer_layer_config": None}, "_layer_config is missing"),
        ("eagle3", {"model_type": "deepseek_v3"}, "'deepseek_v3' are not supported"),
        ("eagle3", {"draft_vocab_size": 62}, "draft_vocab_size 62 does not fit a vocabulary of 61"),
        ("eagle-two-layers", {"draft_vocab_size": 17}, "draft_vocab_size 17 does not fit"),
        ("eagle-vllm", {"truncated_vocab_size": 9}, "truncated_vocab_size=9 is not supported"),
        ("eagle-vllm", {"model": None}, "EAGLE layers of model_type 'eagle' are not supported"),
        ("eagle3", {"draft_vocab_size": 0}, "must be a positive whole number, got 0"),
        ("eagle3", {"norm_output": "yes"}, "norm_output must be true or false, got 'yes'"),
        ("eagle-two-layers", {"fc_norm": True}, "fc_norm is of eagle3, but this is eagle"),
        ("eagle3", {"layernorms": True}, "layernorms is of eagle, but this is eagle3"),
        ("eagle3", {"pard_token": 61}, "pard_token must be a token id below 61, got 61"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
        ("eagle3", {"eagle_config": [1]}, "eagle_config must be an object"),
        ("eagle3", {"dflash_config": [1]}, "dflash_config must be an object"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": "1,2"}, "must be a list of layers"),
        ("eagle3", {"num_aux_hidden_states": 5}, "num_aux_hidden_states=5 needs"),
        ("eagle3", {"target_layer_ids": [1]}, "target_layer_ids=[1] is not supported"),
        ("eagle3", {"use_sliding_window": True}, "sliding windows in a llama layer"),
        ("eagle3", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("eagle3", {"quantization_config": {}}, "quantization_config={} is not supported"),
    ],
)
def test_configs_that_are_not_understood_are_refused(
    name: str, changes: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=re.escape(message)):
        EagleConfig.from_mapping(LAYOUTS[name].config | changes)
