"""`outdraft selftest` as a shell sees it."""

import pytest

from tests.cli.test_commands import run


@pytest.mark.usefixtures("embedded")
def test_the_command_says_what_it_found(command):
    arguments = ["--prompts", "1", "--max-tokens", "6", "--samples", "100", "--device", "cpu"]
    result = run(command, "selftest", *arguments)
    assert result.exit_code == 0
    assert "greedy: 2 of 2 texts" in result.stdout
    assert "temperature 1: 100 texts" in result.stdout


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
