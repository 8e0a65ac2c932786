"""Plans against sums by hand, and against what must hold whatever the numbers are."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.core.errors import ConfigError
from outdraft.planning.hardware import find_hardware
from outdraft.planning.planner import (
    best_length,
    break_even_acceptance,
    break_even_concurrency,
    make_plan,
    plan_memory,
    tokens_by_length,
    tpots_s,
)
from outdraft.planning.shapes import find_drafter, find_network
from outdraft.planning.step_time import (
    CalibratedPredictor,
    Point,
    RooflinePredictor,
    Setup,
    choose_predictor,
    read_points,
    step_time,
)

CARDS = ["h100", "a100", "rtx-4090", "epyc-9554"]
MODELS = ["llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b"]
DRAFTS = ["qwen3-0.6b", "eagle3", "medusa", "suffix"]


def setup(target="llama-3.1-8b", draft="llama-3.2-1b", hardware="h100", **more) -> Setup:
    network = find_network(target)
    return Setup(network, *find_drafter(draft, network), find_hardware(hardware), **more)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.2-1b", 1.236),
        ("llama-3.1-8b", 8.03),
        ("llama-3.3-70b", 70.55),
        ("llama-3.1-405b", 405.85),
        ("llama-2-7b", 6.74),
        ("mistral-7b", 7.25),
        ("mixtral-8x7b", 46.7),
        ("qwen2.5-7b", 7.62),
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.72),
        ("qwen3-32b", 32.76),
        ("qwen3-30b-a3b", 30.5),
    ],
)
def test_known_models_have_the_published_numbers_of_parameters(name, billions):
    assert find_network(name).weight_bytes / 2 / 1e9 == pytest.approx(billions, rel=0.005)


def test_published_names_are_known_in_their_usual_spellings():
    usual = find_network("llama-3.3-70b")
    assert find_network("meta-llama/Llama-3.3-70B-Instruct") == usual


def test_a_step_of_one_request_is_the_sum_by_hand():
    """Llama-3.1-8B on one H100: weights of 2 bytes, and 128 KiB of keys and values a token."""
    products = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    head = 128256 * 4096
    kv_bytes = 384 * 32 * 2 * 1024 * 2
    reading_s = (2 * (products + head) + kv_bytes) / (0.88 * 3350e9)  # one row hides behind it
    step = step_time(setup(), 1, 0, 1.0)
    assert step.target_s == pytest.approx(reading_s + 32 * 30e-6)
    assert step.host_s == pytest.approx(310e-6)
    assert step.draft_s == step.communication_s == 0


def test_many_rows_are_computed_and_not_read():
    few = setup(prompt_tokens=1, output_tokens=10**9)
    products = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    parameters = products + 128256 * 4096
    rows_s = 2 * parameters * 4096 / (0.65 * 989e12)
    reading_s = 2 * parameters / (0.88 * 3350e9)
    computing_s = (rows_s**4 + reading_s**4) ** 0.25  # reading is a fifth of it: no more than 0.1 %
    kv_s = 4096 * few.context_tokens * 131072 / (0.88 * 3350e9)
    expected_s = computing_s + kv_s + 32 * 30e-6
    assert step_time(few, 4096, 0, 1.0).target_s == pytest.approx(expected_s)


def test_two_cards_halve_the_reading_and_pay_for_two_messages_a_layer():
    alone, shared = setup(), setup(hardware="2xh100", tp=2)
    one, two = step_time(alone, 1, 0, 1.0), step_time(shared, 1, 0, 1.0)
    assert two.target_s - 32 * 30e-6 == pytest.approx((one.target_s - 32 * 30e-6) / 2)
    message_s = 9e-6 + 4096 * 2 / (0.7 * 450e9)  # a ring of two sends everything once
    assert two.communication_s == pytest.approx(65 * message_s)


def test_groups_with_a_drafter_each_draft_for_a_part_of_the_requests():
    """Beside two cards that share a target, each drafts for half of the requests, and alone."""
    still = {"prompt_tokens": 100, "output_tokens": 10**9}  # nobody comes
    alone = setup(**still)
    spread = setup(hardware="2xh100", tp=2, draft_tp=1, **still)
    for requests, most_of_a_card in ((1, 1), (2, 1), (7, 4), (64, 32)):
        step = step_time(spread, requests, 3, 1.0)
        of_a_card = step_time(alone, most_of_a_card, 3, 1.0)
        assert step.draft_s == pytest.approx(of_a_card.draft_s)
        assert step.draft_communication_s == 0 < step.target_communication_s


def test_ranks_of_one_memory_read_as_fast_as_those_that_read_at_once_leave_them():
    """A rank reads at most 60 GB/s, and all of them together 80: two have 40 each."""
    still = {"prompt_tokens": 100, "output_tokens": 10**9}
    one = setup(hardware="laptop", **still)
    names = ("num_cards", "link", "link_bandwidth", "link_latency_s", "link_latency_s_per_card")
    linked = {name: getattr(find_hardware("2xh100"), name) for name in names}
    full, half = (replace(one.hardware, bandwidth=bandwidth) for bandwidth in (60e9, 40e9))
    own, shared = replace(half, **linked), replace(full, **linked, shared_bandwidth=80e9)
    for requests, of_a_lone_rank in ((1, full), (2, half), (6, half)):
        step = step_time(replace(one, hardware=shared, tp=2), requests, 3, 1.0)
        like = step_time(replace(one, hardware=own, tp=2), requests, 3, 1.0)
        assert (step.target_s, step.communication_s) == (like.target_s, like.communication_s)
        lone = replace(one, hardware=of_a_lone_rank)
        expected = step_time(lone, -(-requests // 2), 3, 1.0)
        assert step.draft_s == pytest.approx(expected.draft_s)


def test_passes_of_a_drafter_are_as_many_as_its_kind_needs():
    passes = {name: setup(draft=name).num_passes(5) for name in DRAFTS}
    assert passes == {"qwen3-0.6b": 5, "eagle3": 5, "medusa": 1, "suffix": 0}


def test_experts_that_are_hit_grow_from_those_of_a_token_to_all():
    network = find_network("qwen3-30b-a3b")
    read = network.layer_bytes(np.array([1, 2, 4, 10_000])) / 2 / network.num_layers
    hit = (read - network.attention_parameters) / network.expert_parameters
    assert hit == pytest.approx([8, 15.5, 29.1, 128], abs=0.05)


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "vocab_size": 1000,
}
# What a row meets in the feed-forward blocks of the six layers, and all of them, in products of
# hidden size by a width: 3 a block.
FAMILIES = {
    "mixtral": ({}, 6 * 2 * 100, 6 * 8 * 100),
    "qwen2_moe": (
        {
            "num_local_experts": None,
            "num_experts": 16,
            "moe_intermediate_size": 30,
            "shared_expert_intermediate_size": 70,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
        2 * (2 * 30 + 70) + 4 * 100,
        2 * (16 * 30 + 70) + 4 * 100,
    ),
    "glm4_moe": (
        {
            "num_local_experts": None,
            "n_routed_experts": 16,
            "n_shared_experts": 2,
            "moe_intermediate_size": 30,
            "first_k_dense_replace": 1,
        },
        5 * (2 * 30 + 60) + 100,
        5 * (16 * 30 + 60) + 100,
    ),
    "llama4_text": (
        {
            "model_type": "llama4_text",
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 150,
        },
        3 * (100 + 100) + 3 * 150,
        3 * (8 * 100 + 100) + 3 * 150,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_a_family_with_experts_tells_what_rows_read(family, tmp_path):
    changes, of_row, of_all = FAMILIES[family]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL | changes))
    network = find_network(str(path))
    attention = 6 * 64 * (64 + 2 * 32 + 64)
    want = [2 * (attention + 3 * 64 * widths) for widths in (of_row, of_all)]
    assert network.layer_bytes(np.array([1, 10_000])) == pytest.approx(want)
    assert network.row_operations == want[0]
    assert network.weight_bytes == want[1] + 2 * 2 * 64 * 1000


def test_a_drafted_row_of_experts_costs_what_it_reads_until_all_are_read():
    """Mixtral on one GPU at batch 1: two rows read 3.5 experts of 8, a hundred read all."""
    mixtral, eagle = setup("mixtral-8x7b", "suffix"), np.array([0, 1, 99, 100])
    times_s = [step_time(mixtral, 1, length, 1.0).target_s for length in eagle]
    expert_s = 2 * 32 * mixtral.target.expert_parameters / (0.88 * 3350e9)
    assert times_s[1] - times_s[0] == pytest.approx(1.5 * expert_s, rel=0.01)
    assert times_s[3] - times_s[2] < 0.01 * expert_s


def test_with_experts_drafts_may_pay_for_more_requests_where_they_do_not_for_one():
    predictor = RooflinePredictor(setup("mixtral-8x7b", "suffix"))
    tokens = tokens_by_length((0.3,), 4)
    assert best_length(predictor, tokens, 1) == 0
    most = break_even_concurrency(predictor, tokens)
    assert most is not None
    assert most > 16
    assert best_length(predictor, tokens, most) > 0
    assert best_length(predictor, tokens, most + 1) == 0


chances = st.floats(0.05, 0.95)


@settings(max_examples=40, deadline=None)
@given(
    target=st.sampled_from(MODELS),
    draft=st.sampled_from(DRAFTS),
    card=st.sampled_from(CARDS),
    requests=st.integers(1, 256),
    length=st.integers(0, 8),
    chance=chances,
)
def test_steps_grow_with_requests_and_lengths_and_shrink_with_bandwidth(
    target, draft, card, requests, length, chance
):
    one = setup(target, draft, card)
    tokens = tokens_by_length((chance,), 9)
    step = step_time(one, requests, length, tokens[length])
    assert step.total_s > 0
    assert step.total_s <= step_time(one, requests + 1, length, tokens[length]).total_s
    assert step.total_s < step_time(one, requests, length + 1, tokens[length + 1]).total_s * (
        1 + 1e-12
    )
    faster = replace(one.hardware, bandwidth=2 * one.hardware.bandwidth)
    assert step_time(replace(one, hardware=faster), requests, length, 1.0).total_s <= step.total_s


@settings(max_examples=30, deadline=None)
@given(
    draft=st.sampled_from(DRAFTS),
    requests=st.integers(1, 256),
    low=chances,
    high=chances,
)
def test_better_acceptance_never_makes_the_best_tpot_worse(draft, requests, low, high):
    """New prompts arrive sooner when requests end sooner: only a lone request is free of that."""
    predictor = RooflinePredictor(setup(draft=draft, prompt_tokens=1, output_tokens=10**6))
    best = [
        min(tpots_s(predictor, tokens_by_length((chance,), 8), requests))
        for chance in sorted((low, high))
    ]
    assert best[1] <= best[0] * (1 + 1e-6)


@settings(max_examples=25, deadline=None)
@given(draft=st.sampled_from(DRAFTS), card=st.sampled_from(CARDS), chance=chances)
def test_break_even_points_separate_what_pays_from_what_does_not(draft, card, chance):
    predictor = RooflinePredictor(setup("qwen3-8b", draft, card))
    tokens = tokens_by_length((chance,), 6)
    most = break_even_concurrency(predictor, tokens)
    if most == 0:
        assert best_length(predictor, tokens, 1) == 0
    elif most is not None:
        assert best_length(predictor, tokens, most) > 0
        assert best_length(predictor, tokens, most + 1) == 0
    least = break_even_acceptance(predictor, 16, 6)
    if least is not None and least > 0.01:
        assert best_length(predictor, tokens_by_length((least,), 6), 16) > 0
        assert best_length(predictor, tokens_by_length((least - 0.005,), 6), 16) == 0


def test_acceptance_is_a_chance_or_a_share_by_position():
    assert tokens_by_length([0.5], 3) == pytest.approx([1, 1.5, 1.75, 1.875])
    by_position = [0.8, 0.6, 0.3]
    assert tokens_by_length(by_position, 4) == pytest.approx([1, 1.8, 2.4, 2.7, 2.85])
    assert tokens_by_length(by_position, 2) == pytest.approx([1, 1.8, 2.4])
    for wrong in ([], [1.2], [0.5, 0.6]):
        with pytest.raises(ConfigError, match="acceptance"):
            tokens_by_length(wrong, 3)


def test_memory_is_weights_and_what_is_left_for_tokens():
    one = setup("llama-3.1-8b", "llama-3.2-1b", "rtx-4090")
    memory = plan_memory(one, 8)
    weights = 8.03e9 * 2 / 2**30
    assert memory["target_weights_gib"] == pytest.approx(weights, rel=1e-3)
    kv_bytes = 2 * 2 * (32 * 8 * 128 + 16 * 8 * 64)
    assert memory["kv_bytes_per_token"] == kv_bytes
    room = 0.9 * 24 * 2**30 - one.target.weight_bytes - one.drafter.weight_bytes
    assert memory["max_tokens"] == int(room / kv_bytes)
    assert memory["max_requests"] == memory["max_tokens"] // 512


def test_what_does_not_fit_is_said():
    predictor = RooflinePredictor(setup("llama-3.3-70b", "suffix", "rtx-4090"))
    plan = make_plan(predictor, tokens_by_length((0.7,), 4), [1])
    assert plan["memory"]["kv_gib"] < 0
    assert not plan["levels"][0]["fits"]


@settings(max_examples=25, deadline=None)
@given(
    scales=st.tuples(st.floats(0.5, 1.8), st.floats(0.3, 2.0), st.floats(0.4, 2.5)),
    draft=st.sampled_from(["qwen3-0.6b", "eagle3"]),
)
def test_calibration_finds_a_machine_that_is_slower_in_parts(scales, draft):
    """The measured machine takes other shares of the roofline than 1; nine points tell which."""
    one = setup("qwen3-8b", draft)

    def truly_s(requests, length, tokens):
        lone = step_time(one, 1, 0, 1.0).total_s
        step = step_time(one, requests, length, tokens)
        parts = (lone, step.verification_s - lone, step.drafting_s)
        return sum(scale * part for scale, part in zip(scales, parts, strict=True))

    tokens = tokens_by_length((0.7,), 8)
    cases = [(1, 0), (8, 0), (64, 0), (256, 0), (1, 3), (1, 8), (64, 3), (128, 6)]
    points = [Point(r, k, truly_s(r, k, tokens[k]) / tokens[k], tokens[k]) for r, k in cases]
    predictor = CalibratedPredictor(one, points)
    for requests, length in ((1, 5), (16, 2), (100, 0), (200, 8)):
        step, low_s, high_s = predictor.predict(requests, length, tokens[length])
        truth = truly_s(requests, length, tokens[length])
        assert step.total_s == pytest.approx(truth, rel=0.06)
        assert low_s <= truth <= high_s


def test_bands_hold_the_middle_and_shrink_with_points():
    one = setup()
    roofline = RooflinePredictor(one)
    few = CalibratedPredictor(one, [Point(1, 0, 0.007, 1.0)])
    many = CalibratedPredictor(one, [Point(n, 0, 0.007 + n * 2e-5, 1.0) for n in (1, 8, 32, 64)])
    widths = []
    for predictor in (roofline, few, many):
        step, low_s, high_s = predictor.predict(64, 0, 1.0)
        assert low_s < step.total_s < high_s
        widths.append((high_s - low_s) / step.total_s)
    assert widths[2] < widths[1]


def test_modes_are_named():
    point = Point(1, 0, 0.007, 1.0)
    assert choose_predictor(setup(), []).mode == "roofline"
    assert choose_predictor(setup(), [point]).mode == "calibrated"
    assert "2 measured points" in choose_predictor(setup(), [point, point]).basis


def test_points_are_words_tables_or_json(tmp_path):
    table, listed = tmp_path / "points.tsv", tmp_path / "points.json"
    table.write_text("k\tconcurrency\tmean_tpot_ms\tacceptance_length\n3\t1\t15.65\t3.38\n")
    listed.write_text(json.dumps([{"concurrency": 8, "k": 0, "tpot_ms": 47.77}]))
    points = read_points(["1:2:20", str(table), str(listed)], [1.0, 1.5, 1.75])
    assert points == [
        Point(1, 2, 0.02, 1.75),
        Point(1, 3, 0.01565, 3.38),
        Point(8, 0, 0.04777, 1.0),
    ]
    for wrong in ("1:2", "1:2:x", "1:5:20"):  # the last one: nobody says how many tokens
        with pytest.raises(ConfigError, match="measured point"):
            read_points([wrong], [1.0, 1.5])
    with pytest.raises(ConfigError, match="above 0"):
        CalibratedPredictor(setup(), [Point(1, 0, 0.0, 1.0)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: find_network("llama-3.3-71b"), "did you mean 'llama-3.3-70b'"),
        (lambda: find_drafter("eagle4", find_network("qwen3-8b")), "did you mean 'eagle3'"),
        (lambda: find_hardware("2xh10"), "did you mean 'h100"),
        (lambda: find_hardware("2xrtx-4090", "nvlink"), "has no nvlink; it has pcie"),
        (lambda: find_hardware("2xh100", "wires"), "known: nvlink, pcie, pcie-no-p2p"),
        (lambda: find_hardware("h100", graphs="some"), "full, piecewise or none"),
        (lambda: find_network("qwen3-8b", "int3"), "unknown dtype 'int3'"),
        (lambda: setup(tp=2), "between 1 and the 1 cards"),
        (lambda: setup(hardware="2xh100", draft_tp=2), "draft_tp 2 must divide tp 1"),
    ],
)
def test_errors_name_what_is_wrong_and_what_is_allowed(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_configs_of_checkpoints_are_read(tmp_path):
    sizes = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    network = find_network(str(tmp_path))
    assert replace(network, name="") == replace(find_network("llama-3.1-8b"), name="")
    quantized = sizes | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    assert find_network(str(tmp_path / "config.json")).dtype == "int4"
    head = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **sizes,
        "num_hidden_layers": 1,
        "draft_vocab_size": 32000,
    }
    (tmp_path / "config.json").write_text(json.dumps(head))
    method, drafter = find_drafter(str(tmp_path), network)
    assert method == "eagle3"
    assert drafter.num_layers == 1
    assert drafter.head_parameters == 32000 * 4096
    assert drafter.attention_parameters == 4096 * (2 * 4096 + 2 * 2 * 1024 + 4096)


def test_a_card_can_be_described_by_a_file(tmp_path):
    card = {"kind": "gpu", "memory_gb_s": 100, "memory_gib": 8, "tflops": {"bf16": 10}}
    path = tmp_path / "card.json"
    path.write_text(json.dumps(card))
    assert find_hardware(str(path)).bandwidth == 100e9
    path.write_text(json.dumps({"kind": "gpu"}))
    with pytest.raises(ConfigError, match="no description of a card"):
        find_hardware(str(path))
