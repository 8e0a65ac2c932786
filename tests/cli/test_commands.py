"""The commands as a shell sees them: stdout, stderr, exit codes."""

import json
import os
import subprocess
import sys

import pytest
import torch

from outdraft import assets
from outdraft.cli.app import app
from outdraft.cli.generate import chat
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM
from outdraft.kernels.native.library import usable_instruction_sets
from tests.models.checkpoints import llama, randomised, save
from tests.oracle.engines import tokenizer

SMALL = ["--dtype", "float32", "--device", "cpu", "--kv-cache-memory", "256Ki"]


def expected_text(model, prompt, max_tokens):
    llm = LLM(str(model), dtype="float32", device="cpu", num_blocks=16)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text


def printable(text):
    """What a terminal shows of it, without the places where it breaks lines."""
    return "".join(letter for letter in text if letter.isprintable() and not letter.isspace())


def run(command, *arguments, **options):
    """stdout, stderr and exit code; an error that is not reported fails the test."""
    result = command.invoke(app, [str(argument) for argument in arguments], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_generate_writes_the_greedy_completion_and_nothing_else_to_stdout(command, pair):
    arguments = ["generate", pair.target, "-p", "def add(", "--temperature", "0", *SMALL]
    result = run(command, *arguments, "--max-tokens", "12")
    assert result.exit_code == 0
    assert result.stdout == expected_text(pair.target, "def add(", 12) + "\n"
    assert "12 tokens" in result.stderr


def test_generate_completes_what_is_piped_in_without_the_shells_newline(command, pair):
    arguments = ["generate", pair.target, "--temperature", "0", "--max-tokens", "8", *SMALL]
    piped = run(command, *arguments, input="def add(\n")
    assert piped.stdout == run(command, *arguments, "-p", "def add(").stdout
    assert piped.exit_code == 0


@pytest.mark.usefixtures("embedded")
def test_the_embedded_pair_gives_its_targets_greedy_text(command, pair):
    arguments = ["generate", "-p", "def add(", "--temperature", "0", "--max-tokens", "40", *SMALL]
    result = run(command, *arguments)
    assert result.stdout == expected_text(pair.target, "def add(", 40) + "\n"
    assert "acceptance length" in result.stderr


def test_the_same_seed_gives_the_same_sampled_text_and_another_seed_another(command, pair):
    arguments = ["generate", pair.target, "-p", "def add(", "--max-tokens", "24", *SMALL]
    first, again, other = (run(command, *arguments, "--seed", seed).stdout for seed in (7, 7, 8))
    assert first == again
    assert first != other


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_model_whose_weights_are_nan_ends_in_an_error(command, tmp_path, temperature):
    model = randomised(llama())
    model.model.norm.weight.data.fill_(torch.nan)
    path = save(model, tmp_path)
    tokenizer().save(str(path / "tokenizer.json"))
    arguments = ["generate", path, "-p", "w5 w6", "--temperature", temperature, *SMALL]
    result = run(command, *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "no finite logits for token 1 of the output" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--temperature", "-1"], "temperature must be between 0.0 and 100.0"),
        (["--dtype", "int4"], "dtype must be one of"),
        (["--speculative-config", '{"method": "medusa3"}'], "method must be one of"),
        (["--speculative-config", '{"metod": "suffix"}'], "did you mean 'method'"),
        (["--max-model-len", "100000"], "more than the 192 positions"),
        (["--kv-cache-memory", "lots"], "no number of bytes"),
        (["--kernels", "flash"], "unknown kernels"),
        (["-p", ""], "prompt must hold at least one token"),
    ],
)
def test_what_cannot_be_done_is_one_line_on_stderr_and_exit_code_2(
    command, pair, arguments, complaint
):
    result = run(command, "generate", pair.target, "-p", "x", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("no_assets")
@pytest.mark.parametrize("name", ["demo", "generate"])
def test_without_the_embedded_pair_its_commands_say_so(command, name):
    result = run(command, name, *(["-p", "x"] if name == "generate" else []))
    assert result.exit_code == 2
    assert "no embedded" in result.stderr


def test_a_model_that_does_not_exist_is_exit_code_2(command, tmp_path):
    result = run(command, "generate", tmp_path / "none", "-p", "x")
    assert result.exit_code == 2
    assert "no such directory" in result.stderr


def test_an_unknown_flag_is_exit_code_2(command):
    assert run(command, "generate", "--tempurature", "1").exit_code == 2


def test_chat_answers_every_line_and_carries_the_conversation_on(command, pair):
    arguments = ["chat", pair.chatting, "--temperature", "0", "--max-tokens", "6", *SMALL]
    result = run(command, *arguments, input="left\nleft\n")
    assert result.exit_code == 0
    first = "<begin>user: left\nassistant: "
    answer = expected_text(pair.chatting, first, 6)
    second = f"{first}{answer}\nuser: left\nassistant: "
    assert result.stdout == f"{answer}\n{expected_text(pair.chatting, second, 6)}\n"
    assert result.stderr.count("(6 tokens in ") == 2


def test_chat_with_a_model_without_a_template_points_to_generate(command, pair):
    result = run(command, "chat", pair.target, input="hello\n")
    assert result.exit_code == 2
    assert "outdraft generate" in result.stderr


def test_the_flags_of_a_command_keep_its_docstring_and_name():
    assert chat.__name__ == "chat"
    assert "Ctrl-D" in (chat.__doc__ or "")


def test_version_is_one_line(command):
    result = run(command, "--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("outdraft ")


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
def test_doctor_names_what_will_run_and_finds_the_embedded_pair(command):
    result = run(command, "doctor")
    assert result.exit_code == 0
    shown = " ".join(result.stdout.split())
    for part in ("threads", "torch", "kernels", "place_rows", "OMP_NUM_THREADS", "4 held out"):
        assert part in shown, part
    if not torch.cuda.is_available():
        assert "for a bfloat16 checkpoint, whose weights are kept bfloat16" in shown
        assert all(name in shown for name in usable_instruction_sets())
        assert shown.count("times as fast as weights as they are") == 2
    assert "no embedded" not in shown


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
def test_doctor_shows_what_steps_cost_and_where_it_is_kept(command):
    options = ("doctor", "--cost", "--dtype", "float32", "--device", "cpu", "--max-num-seqs", "2")
    shown = [run(command, *options).stdout for _ in range(2)]
    for part in ("Target, by rows", "draft_model, a pass by rows", "roofline", "the host", "kept"):
        assert part in shown[0], part
    measured = [line for line in shown[0].splitlines() if "a pass by rows" in line or "│" in line]
    assert sum(line.count("%") for line in measured) >= 8
    rows = [[line.split("│")[1:3] for line in one.splitlines() if "│" in line] for one in shown]
    assert rows[0] == rows[1], "measured once"
    refused = run(command, *options, "--speculative-config", "null")
    assert refused.exit_code == 2


@pytest.mark.slow
@pytest.mark.usefixtures("no_assets")
def test_doctor_says_what_is_missing(command):
    result = run(command, "doctor")
    assert result.exit_code == 0
    assert result.stdout.count("missing:") >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_heads", "dtype"), [(False, "auto"), (True, "auto"), (True, "bfloat16")]
)
def test_demo_json_is_one_object_of_the_promised_shape(command, request, has_heads, dtype):
    request.getfixturevalue("embedded_heads" if has_heads else "embedded")
    options = ("--max-tokens", "10", "--prompts", "2", "--dtype", dtype)
    result = run(command, "demo", "--json", *options)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert set(report) == {"temperature", "plain", "methods"}
    assert report["temperature"] == 0.8
    assert set(report["plain"]) == {"tokens_per_s", "tpot_ms"}
    heads = assets.HEADS if has_heads else ()
    assert list(report["methods"]) == ["draft_model", *heads, "suffix", "ngram", "combined"]
    for numbers in report["methods"].values():
        assert set(numbers) == {
            "tokens_per_s",
            "tpot_ms",
            "acceptance_rate",
            "acceptance_length",
            "speedup",
            "identical",
        }
        assert numbers["identical"] is True


def test_demo_shows_every_prompts_whole_text_a_legend_and_a_table(command, embedded):
    result = run(command, "demo", "--max-tokens", "12", "--prompts", "2", "--temperature", "0")
    assert result.exit_code == 0
    for prompt in ("def add(left,", "return right -"):
        text = expected_text(embedded.target, prompt, 12)
        assert printable(prompt + text) in printable(result.stdout)
    for part in ("# 0.py", "# 1.py", "draft model", "n-gram", "GB/s", "KV cache", "combined"):
        assert part in result.stdout
    assert "Temperature 0, float32" in result.stdout
    assert "# 2.py" not in result.stdout


def test_demo_keeps_one_prompt_for_warming_up(command, embedded):
    result = run(command, "demo", "--prompts", "4")
    assert result.exit_code == 2
    assert "--prompts must be below 4" in result.stderr


def test_help_is_given_without_loading_torch():
    code = (
        "import sys; sys.argv[1:] = ['--help']\n"
        "from outdraft.cli import main\n"
        "try: main()\n"
        "except SystemExit: print('torch loaded:', 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "generate" in done.stdout
    assert done.stdout.endswith("torch loaded: False\n")
