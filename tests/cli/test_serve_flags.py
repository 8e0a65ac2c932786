"""What `outdraft serve` makes of its flags, before anything is started."""

import json
import re
from pathlib import Path

import pytest

from outdraft.cli import serving
from outdraft.cli.app import app
from outdraft.cli.options import EngineOptions, SchedulerOptions, engine_config
from outdraft.cli.serve import ServerOptions, api_key, listed, profiler_dir
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
    assert engine_config("m", EngineOptions(), SchedulerOptions()) == EngineConfig.from_options(
        model="m", speculative_config={"method": "suffix"}
    )
    plain = engine_config("m", EngineOptions(speculative_config="null"), SchedulerOptions())
    assert plain.speculation.sources == ()


def test_the_embedded_pair_is_served_with_all_it_has(embedded):
    config = engine_config(None, EngineOptions(), SchedulerOptions())
    assert DraftSource.MODEL in config.speculation.methods
    assert DraftSource.SUFFIX in config.speculation.methods


def test_flags_of_the_scheduler_reach_it():
    options = SchedulerOptions(
        max_num_seqs=3,
        max_num_batched_tokens=99,
        max_waiting=5,
        scheduling_policy="priority",
        speculative_disable_queue_size=2,
    )
    config = engine_config("m", EngineOptions(), options)
    assert config.scheduler.max_num_seqs == 3
    assert config.scheduler.max_num_batched_tokens == 99
    assert config.scheduler.max_waiting == 5
    assert config.scheduler.scheduling_policy == "priority"
    assert config.speculation.disable_by_batch_size == 2


def test_no_queue_disables_what_is_off_already():
    options = SchedulerOptions(speculative_disable_queue_size=2)
    with pytest.raises(ConfigError, match="without speculation"):
        engine_config("m", EngineOptions(speculative_config="null"), options)


def test_a_limit_of_the_queue_that_is_none_is_refused_by_the_flags_name():
    options = SchedulerOptions(speculative_disable_queue_size=0)
    with pytest.raises(ConfigError, match="--speculative-disable-queue-size"):
        engine_config("m", EngineOptions(), options)


def test_two_limits_of_the_queue_are_refused():
    options = SchedulerOptions(speculative_disable_queue_size=2)
    for limit in (1, "many"):
        given = json.dumps({"method": "suffix", "disable_by_batch_size": limit})
        with pytest.raises(ConfigError, match="the same limit"):
            engine_config("m", EngineOptions(speculative_config=given), options)
    for limit in (2, None):
        given = json.dumps({"method": "suffix", "disable_by_batch_size": limit})
        config = engine_config("m", EngineOptions(speculative_config=given), options)
        assert config.speculation.disable_by_batch_size == 2


def test_the_command_line_wins_over_the_file(command, started, tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('model = "some/model"\nport = 1234\nhost = "::1"\nmax_num_seqs = 7\n')
    result = command.invoke(app, ["serve", "--config", str(file), "--port", "99"])
    assert result.exit_code == 0, result.output
    [(config, options, replicas, environ, named)] = started
    assert not replicas.has_replicas
    assert (options.port, options.host) == (99, "::1")
    assert (config.model, config.scheduler.max_num_seqs) == ("some/model", 7)
    assert named == {"is_embedded": False}
    assert {"OMP_NUM_THREADS", "GOMP_SPINCOUNT"} <= environ.keys()


@pytest.mark.parametrize("value", ['"one"', '["one"]'])
def test_a_repeatable_flag_is_a_list_in_the_file_or_one_value(command, started, tmp_path, value):
    file = tmp_path / "serve.toml"
    file.write_text(f"served-model-name = {value}\n")
    result = command.invoke(app, ["serve", "m", "--config", str(file)])
    assert result.exit_code == 0, result.output
    assert started[0][1].served_model_name == ["one"]


def test_a_server_drains_for_a_day_at_most(command, started):
    result = command.invoke(app, ["serve", "m", "--drain-timeout", "inf"])
    assert result.exit_code == 2
    assert "86400" in result.output
    assert started == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "'prot'.*did you mean 'port'"),
        ("config = 'other'", "unknown key 'config'"),
        ("port = ", "not valid TOML"),
        ("port = 'many'", "port"),
        ("max-num-seqs = true", "'max-num-seqs' in .* takes a value"),
        ("model = false", "'model' in .* takes a value"),
        ("served-model-name = ['a', true]", "'served-model-name' in .* takes a value"),
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
    ("flag", "value"),
    [
        ("--log-level", "loud"),
        ("--tool-call-parser", "morse"),
        ("--reasoning-parser", "morse"),
        ("--chat-template-content-format", "morse"),
        ("--root-path", "llm"),
        ("--root-path", "/llm/"),
        ("--allowed-origins", '["a", 5]'),
        ("--allowed-hosts", "[a"),
        ("--api-key", ""),
        ("--served-model-name", ""),
        ("--data-parallel-size", "0"),
        ("--ssl-keyfile", __file__),
        ("--ssl-certfile", __file__),
        ("--header-timeout", "0"),
        ("--profiler-config", "{"),
        ("--profiler-config", "[]"),
        ("--profiler-config", "{}"),
        ("--profiler-config", '{"torch_profiler_dir": "d", "profiler": "cuda"}'),
        ("--profiler-config", '{"torch_profiler_dr": "d"}'),
    ],
)
def test_a_value_that_does_not_exist_is_refused(command, flag: str, value: str):
    result = command.invoke(app, ["serve", "m", flag, value])
    assert result.exit_code == 2
    assert flag.strip("-").replace("-", "_") in result.output.replace("-", "_")


def key_of(text: str, folder: Path) -> Path:
    path = folder / "key"
    path.write_text(text)
    return path


def test_a_key_comes_from_a_flag_a_file_or_the_environment_in_this_order(tmp_path):
    environ = {"OUTDRAFT_API_KEY": "from outside"}
    file = key_of("from a file\n", tmp_path)
    assert api_key(ServerOptions(), {}) is None
    assert api_key(ServerOptions(), environ) == "from outside"
    assert api_key(ServerOptions(api_key="from a flag"), environ) == "from a flag"
    assert api_key(ServerOptions(api_key_file=file), environ) == "from a file"


def test_a_key_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"--api-key-file .* cannot be read"):
        api_key(ServerOptions(api_key_file=tmp_path / "key"), {})


def test_a_key_that_is_empty_or_given_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="OUTDRAFT_API_KEY is empty"):
        api_key(ServerOptions(), {"OUTDRAFT_API_KEY": ""})
    with pytest.raises(ConfigError, match=r"--api-key-file .* is empty"):
        api_key(ServerOptions(api_key_file=key_of("\n", tmp_path)), {})
    with pytest.raises(ConfigError, match="exclude each other"):
        api_key(ServerOptions(api_key="a", api_key_file=key_of("a", tmp_path)), {})


def test_the_profilers_directory_is_named_as_in_vllm():
    assert profiler_dir(None) is None
    text = '{"profiler": "torch", "torch_profiler_dir": "/traces"}'
    assert profiler_dir(text) == Path("/traces")


def test_a_list_is_json_as_in_vllm_or_the_flag_again():
    assert listed(["http://a", '["http://b", "*"]'], "--x") == ("http://a", "http://b", "*")
    assert listed(None, "--x") == ()


@pytest.mark.parametrize(
    ("flags", "address", "names"),
    [
        ([], "127.0.0.1", ("127.0.0.1",)),
        (["--allowed-hosts", "box.lan"], "127.0.0.1", ("box.lan", "127.0.0.1")),
        (["--host", "my.box"], "127.0.1.1", ("my.box",)),
        (["--allowed-hosts", "*"], "127.0.0.1", None),
        (["--host", "0.0.0.0"], "0.0.0.0", None),
        (["--host", "0.0.0.0", "--allowed-hosts", "box.lan"], "0.0.0.0", ("box.lan",)),
        (["--host", "::1"], "::1", ("::1",)),
        (["--host", "::"], "::", None),
    ],
)
def test_on_loopback_only_its_names_are_answered_to(command, started, flags, address, names):
    assert command.invoke(app, ["serve", "m", *flags]).exit_code == 0
    [(_, options, *_)] = started
    chosen = listed(options.allowed_hosts, "--allowed-hosts")
    assert serving.allowed_hosts(chosen, options.host, address) == names


@pytest.mark.parametrize(("flag", "logs"), [("--enable-log-requests", True), (None, False)])
def test_requests_are_logged_when_the_flag_says_so(command, started, flag, logs):
    flags = [flag] if flag else ["--no-enable-log-requests"]
    assert command.invoke(app, ["serve", "m", *flags]).exit_code == 0
    [(_, options, *_)] = started
    assert options.enable_log_requests is logs


def test_a_model_chooses_its_calls_where_it_is_known_how_it_writes_them(command):
    result = command.invoke(app, ["serve", "m", "--enable-auto-tool-choice"])
    assert result.exit_code == 2
    assert "--tool-call-parser" in result.output


def test_flags_of_the_answers_reach_the_server(command, started):
    flags = ("--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--reasoning-parser")
    assert command.invoke(app, ["serve", "m", *flags, "qwen3"]).exit_code == 0
    [(config, options, *_)] = started
    settings = serving.settings_of(config, options, {}, is_embedded=False)
    assert (settings.tool_call_parser, settings.reasoning_parser) == ("hermes", "qwen3")
    assert settings.auto_tool_choice


def test_a_trace_that_exists_is_refused_before_anything_is_loaded(command, embedded, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("mine")
    result = command.invoke(app, ["serve", "--port", "0", "--record-trace", str(path)])
    assert result.exit_code == 2
    assert "exists already" in result.output
    assert "loading" not in result.output
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "message"), [(b"{{ messages }", "not valid Jinja"), (b"\xff", "codec can't decode")]
)
def test_a_wrong_chat_template_is_refused_before_anything_is_loaded(
    command, embedded, tmp_path, text: bytes, message: str
):
    path = tmp_path / "chat.jinja"
    path.write_bytes(text)
    result = command.invoke(app, ["serve", "--port", "0", "--chat-template", str(path)])
    assert result.exit_code == 2
    assert f"--chat-template {path}: " in result.output
    assert message in result.output
    assert "loading" not in result.output
