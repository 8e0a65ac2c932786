"""`outdraft bench methods` as a shell sees it."""

import json

import pytest

from outdraft import assets
from outdraft.bench import side_by_side
from tests.cli.pair import completed
from tests.cli.test_commands import run

SHORT = ["--prompts", "2", "--max-tokens", "6", "--device", "cpu"]
SPEED = {
    "acceptance_length",
    "draft_ms",
    "verify_ms",
    "sample_ms",
    "host_ms",
    "tokens_per_s",
    "ratio_to_plain",
}
PAIR = ["draft_model", "draft_model-tree"]
HEADS = ["eagle3", "eagle3-tree", "medusa", "mlp_speculator", "dspark"]
HOST = ["ngram", "suffix"]


def measured(command, *arguments):
    result = run(command, "bench", "methods", "--json", *SHORT, *arguments)
    assert result.exit_code == 0
    return json.loads(result.stdout)


@pytest.mark.usefixtures("embedded_heads")
def test_json_holds_every_method_of_the_installation_beside_plain_decoding(command):
    report = measured(command)
    assert list(report["methods"]) == [*PAIR, *HEADS, *HOST, "combined"]
    assert report["all_identical"] is True
    assert {"commit", "host", "versions", "threads"} <= set(report["environment"])
    assert report["plain"]["weight_bytes"] > 0
    assert report["plain"]["temperature_0"]["ratio_to_plain"] == 1.0
    for name, numbers in report["methods"].items():
        assert numbers["identical"] is True
        assert ("draft_us_per_request_32k" in numbers) == (name in HOST)
        assert (numbers["weight_bytes"] == 0) == (name in HOST)
        for key in ("temperature_0", "temperature_1"):
            assert set(numbers[key]) == SPEED
            assert numbers[key]["acceptance_length"] >= 1
            assert numbers[key]["tokens_per_s"] > 0
    keeps = {name: one["kv_bytes_per_1k_tokens"] > 0 for name, one in report["methods"].items()}
    with_cache = [*PAIR, *HEADS[:2], "dspark", "combined"]
    assert [name for name, does in keeps.items() if does] == with_cache


@pytest.mark.usefixtures("embedded")
def test_heads_that_the_package_has_not_are_left_out(command):
    report = measured(command)
    assert list(report["methods"]) == [*PAIR, *HOST, "combined"]


@pytest.mark.usefixtures("embedded_heads")
def test_the_table_has_a_line_for_each_that_was_chosen(command):
    result = run(command, "bench", "methods", *SHORT, "--methods", "eagle3-tree, suffix")
    assert result.exit_code == 0
    lines = [line.split("│")[1].strip() for line in result.stdout.splitlines() if "│" in line]
    assert lines[-3:] == ["plain", "eagle3-tree", "suffix"]
    assert "every method gave plain decoding's tokens" in result.stdout
    assert "32k tokens: suffix" in result.stdout


@pytest.mark.usefixtures("embedded")
def test_a_changed_token_is_exit_code_1_and_names_the_method(command, monkeypatch):
    complete = side_by_side.complete_in_turn

    def changing(engines, *rest):
        samples = complete(engines, *rest)
        last = samples["ngram"][-1]
        changed = [*last.token_ids[:-1], -1]
        samples["ngram"][-1] = completed(
            changed, last.num_decoded, last.decode_s, last.decode_stats
        )
        return samples

    monkeypatch.setattr(side_by_side, "complete_in_turn", changing)
    chosen = ["--methods", "ngram,suffix"]
    result = run(command, "bench", "methods", *SHORT, *chosen)
    assert result.exit_code == 1
    assert "tokens were changed by ngram." in result.stdout
    result = run(command, "bench", "methods", "--json", *SHORT, *chosen)
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["all_identical"] is False
    assert [one["identical"] for one in report["methods"].values()] == [False, True]


@pytest.mark.usefixtures("embedded")
def test_another_target_has_those_of_the_host_and_what_is_configured(command, pair):
    head = {"method": "medusa", "model": str(pair.heads["medusa"])}
    texts = [json.dumps(head), json.dumps({**head, "tree_levels": [2, 1]}), '{"method": "ngram"}']
    flags = [part for text in texts for part in ("--speculative-config", text)]
    report = measured(command, pair.target, *flags)
    assert report["model_id"] == str(pair.target)
    assert list(report["methods"]) == [*HOST, "medusa", "medusa-tree", "ngram#2"]
    assert report["methods"]["medusa"]["speculative_config"] == head
    assert report["all_identical"] is True


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--methods", "ngram,sufix"], "draft_model, draft_model-tree, ngram, suffix, combined"),
        (["--methods", "eagle3-tree"], "no embedded eagle3: recipes/draft_heads makes it"),
        (["--methods", ""], "--methods must be of"),
        (["--speculative-config", "null"], "plain is measured anyway"),
        (["--speculative-config", '{"method": "medusa"}'], "no embedded medusa"),
        (["--prompts", "4"], "--prompts must be below 4"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_code_2(command, arguments, complaint):
    result = run(command, "bench", "methods", "--prompts", "1", *arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1


def test_every_head_of_the_package_can_be_chosen():
    from outdraft.cli.bench_methods import EMBEDDED

    assert set(assets.HEADS) <= {values["method"] for values in EMBEDDED.values()}
