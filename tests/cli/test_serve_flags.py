"""What `outdraft serve` makes of its flags, before anything is started."""

import re

import pytest

from outdraft.cli import serving
from outdraft.cli.app import app
from outdraft.cli.options import EngineOptions, SchedulerOptions, serving_config
from outdraft.config.engine import EngineConfig
from outdraft.core.draft import DraftSource
from outdraft.core.errors import ConfigError


@pytest.fixture
def started(monkeypatch) -> list:
    """Arguments of the servers that would have been started."""
    calls = []

    def run(*values, **named) -> int:
        calls.append((*values, named))
        return 0

    monkeypatch.setattr(serving, "run", run)
    return calls


def test_a_model_is_served_with_suffix_decoding_unless_told_otherwise():
    assert serving_config("m", EngineOptions(), SchedulerOptions()) == EngineConfig.from_options(
        model="m", speculative_config={"method": "suffix"}
    )
    plain = serving_config("m", EngineOptions(speculative_config="null"), SchedulerOptions())
    assert plain.speculation.sources == ()


def test_the_embedded_pair_is_served_with_all_it_has(embedded):
    config = serving_config(None, EngineOptions(), SchedulerOptions())
    assert DraftSource.MODEL in config.speculation.methods
    assert DraftSource.SUFFIX in config.speculation.methods


def test_flags_of_the_scheduler_reach_it():
    options = SchedulerOptions(
        max_num_seqs=3,
        max_num_batched_tokens=99,
        max_waiting=5,
        policy="priority",
        speculative_disable_queue_size=2,
    )
    config = serving_config("m", EngineOptions(), options)
    assert config.scheduler.max_num_seqs == 3
    assert config.scheduler.max_num_batched_tokens == 99
    assert config.scheduler.max_waiting == 5
    assert config.scheduler.policy == "priority"
    assert config.speculation.disable_by_batch_size == 2


def test_no_queue_disables_what_is_off_already():
    options = SchedulerOptions(speculative_disable_queue_size=2)
    with pytest.raises(ConfigError, match="without speculation"):
        serving_config("m", EngineOptions(speculative_config="null"), options)


def test_the_command_line_wins_over_the_file(command, started, tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('model = "some/model"\nport = 1234\nhost = "::1"\nmax_num_seqs = 7\n')
    result = command.invoke(app, ["serve", "--config", str(file), "--port", "99"])
    assert result.exit_code == 0, result.output
    [(config, options, environ, named)] = started
    assert (options.port, options.host) == (99, "::1")
    assert (config.model, config.scheduler.max_num_seqs) == ("some/model", 7)
    assert named == {"is_embedded": False}
    assert {"OMP_NUM_THREADS", "GOMP_SPINCOUNT"} <= environ.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "'prot'.*did you mean 'port'"),
        ("config = 'other'", "unknown key 'config'"),
        ("port = ", "not valid TOML"),
        ("port = 'many'", "port"),
    ],
)
def test_a_wrong_file_is_refused(command, started, tmp_path, text: str, message: str):
    file = tmp_path / "serve.toml"
    file.write_text(text)
    result = command.invoke(app, ["serve", "m", "--config", str(file)])
    assert result.exit_code == 2
    assert started == []
    assert re.search(message, " ".join(result.output.split()))


@pytest.mark.parametrize(
    ("flag", "value"), [("--log-level", "loud"), ("--tool-call-parser", "morse")]
)
def test_a_value_that_does_not_exist_is_refused(command, flag: str, value: str):
    result = command.invoke(app, ["serve", "m", flag, value])
    assert result.exit_code == 2
    assert flag in result.output
