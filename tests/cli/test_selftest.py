"""`outdraft selftest` as a shell sees it."""

import re

import pytest

from outdraft.cli.selftest import show
from outdraft.kernels.data.drafts import row_index_BN1
from outdraft.kernels.torch import verification
from tests.cli.test_commands import run


@pytest.mark.usefixtures("embedded")
def test_the_command_says_what_it_found(command):
    arguments = ["--prompts", "1", "--max-tokens", "6", "--samples", "100", "--device", "cpu"]
    result = run(command, "selftest", *arguments)
    assert result.exit_code == 0
    assert "greedy: 2 of 2 texts" in result.stdout
    assert "temperature 1: 200 texts" in result.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
def test_a_rule_that_keeps_what_the_target_does_not_choose_ends_it_with_1(command, monkeypatch):
    match = verification.match

    def keeps_firsts(choices_R, drafts):
        choices_R = choices_R.clone()
        is_drafted_B = drafts.num_drafts_B > 0
        if is_drafted_B.any():
            roots_R = row_index_BN1(drafts)[is_drafted_B, 0]
            choices_R[roots_R] = drafts.token_ids_BN[is_drafted_B, 0]
        return match(choices_R, drafts)

    monkeypatch.setattr(verification, "match", keeps_firsts)
    arguments = ["--prompts", "1", "--max-tokens", "6", "--samples", "100", "--device", "cpu"]
    short = '{"method": "draft_model", "num_speculative_tokens": 1}'
    arguments += ["--speculative-config", short, "--kernels", "reference"]
    result = run(command, "selftest", *arguments)
    assert result.exit_code == 1, result.stderr
    assert "FAIL greedy" in result.stdout
    parted = re.search(
        r"prompt 0, \w+, parts at token (\d): (\d+) became (\d+), which the target likes less by "
        r"(far|\S+ nats)\n",
        result.stdout,
    )
    assert parted is not None
    assert int(parted[1]) < 6
    assert parted[2] != parted[3]


@pytest.mark.parametrize(("gap", "told"), [(0.512, "0.51 nats"), (None, "far")])
def test_the_first_difference_is_told_with_the_gap(capsys, gap, told):
    speed = dict.fromkeys(
        ("tokens_per_s", "ratio_to_plain", "acceptance_length", "acceptance_rate"), 1.0
    )
    names = ("engine", "prompt", "place", "plain_id", "speculative_id", "gap")
    found = ("always", 3, 7, 11, 12, gap), ("always", 4, 0, 1, 2, 9.0)
    differences = [dict(zip(names, one, strict=True)) for one in found]
    counts = {"num_prompts": 5, "max_tokens": 8, "num_samples": 100, "num_beginnings": 1}
    show(counts | {"differences": differences, "p_value": 0.5, "speed": speed})
    lines = capsys.readouterr().out.splitlines()
    assert "FAIL greedy: 8 of 10 texts" in lines[0]
    assert lines[1].strip() == (
        f"prompt 3, always, parts at token 7: 11 became 12, which the target likes less by {told}"
    )
    assert "ok   temperature 1" in lines[2]


@pytest.mark.usefixtures("embedded")
def test_what_promises_nothing_is_refused(command):
    lossy = '{"method": "draft_model", "rejection_sample_method": "lossy_typical"}'
    result = run(command, "selftest", "--speculative-config", lossy)
    assert result.exit_code == 2
    assert "lossy_typical" in result.stderr
    assert run(command, "selftest", "--speculative-config", "null").exit_code == 2


def test_texts_are_drawn_for_no_more_prompts_than_there_are(command):
    result = run(command, "selftest", "--prompts", "3", "--sampled-prompts", "4")
    assert result.exit_code == 2
    assert "sampled_prompts must be between 1 and 3" in result.stderr
