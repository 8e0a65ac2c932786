"""What the server logs: rates while there is traffic, one line each, and no text of a request."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime

import pytest

from outdraft.core.draft import DraftSource
from outdraft.core.request import FinishReason
from outdraft.server.logs import LogLevel, TrafficLog, set_up_logging
from outdraft.server.metrics import Metrics, Series
from tests.logging_state import loggers_put_back
from tests.server.metrics.scripted import INFO, Exposed, Script, metrics, report, step


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """For set_up_logging; what it changed is put back."""
    with loggers_put_back():
        yield io.StringIO()


def serve_one(counted) -> None:
    """Four prompt tokens, three of them cached."""
    script = Script(counted, num_cached=3)
    script.gain(12.0, (1,))
    script.gain(12.5, (4,), ("stop",))


def test_a_line_has_the_rates_since_the_line_before(stream):
    set_up_logging(LogLevel.INFO, stream)
    counted = metrics()
    counted.observe_steps(report(step((3,), (3,)), running=1))  # before the log: not in it
    log = TrafficLog(counted.registry)
    serve_one(counted)
    counted.observe_steps(
        report(
            step((3, 1), (2, 0)),
            step((2,), (1,), source=DraftSource.MODEL),
            running=2,
            waiting=1,
            kv_usage=0.125,
        )
    )
    log.log(elapsed_s=2.0)
    line = stream.getvalue()
    assert line.endswith(
        " INFO outdraft.server.logs: prompt 2.0 tok/s, generation 3.0 tok/s, running 2, waiting 1, "
        "KV 12.5%, prefix hits 75.0%, acceptance length 2.00, "
        "accepted suffix 50.0% draft_model 50.0%\n"
    )


def test_a_line_is_about_all_engines_together(stream):
    set_up_logging(LogLevel.INFO, stream)
    shared = Series({"model_name": "served"}, {})
    both = [Metrics(INFO, "served", None, place, shared) for place in range(2)]
    log = TrafficLog(shared.registry)
    for counted, usage in zip(both, (0.1, 0.3), strict=True):
        serve_one(counted)
        counted.observe_steps(report(step((3, 1), (2, 0)), running=2, kv_usage=usage))
    log.log(elapsed_s=2.0)
    assert stream.getvalue().endswith(
        ": prompt 4.0 tok/s, generation 4.0 tok/s, running 4, waiting 0, KV 20.0%, "
        "prefix hits 75.0%, acceptance length 2.00, accepted suffix 50.0%\n"
    )


def test_what_there_was_none_of_is_left_out(stream):
    set_up_logging(LogLevel.INFO, stream)
    counted = metrics()
    log = TrafficLog(counted.registry)
    counted.observe_steps(report(step((0, 0))))
    log.log(elapsed_s=10.0)
    assert stream.getvalue().endswith(
        ": prompt 0.0 tok/s, generation 0.2 tok/s, running 0, waiting 0, KV 0.0%\n"
    )


def test_silence_without_traffic(stream):
    set_up_logging(LogLevel.INFO, stream)
    counted = metrics()
    log = TrafficLog(counted.registry)
    log.log(elapsed_s=10.0)
    assert stream.getvalue() == ""
    counted.observe_steps(report(waiting=1))  # nothing moves, but somebody waits
    log.log(elapsed_s=10.0)
    assert stream.getvalue().count("\n") == 1
    counted.observe_steps(report())
    log.log(elapsed_s=10.0)
    assert stream.getvalue().count("\n") == 1


def test_json_lines_carry_the_numbers(stream):
    set_up_logging(LogLevel.INFO, stream, as_json=True)
    counted = metrics()
    log = TrafficLog(counted.registry)
    serve_one(counted)
    counted.observe_steps(report(step((3, 1), (2, 0)), running=2, kv_usage=0.5))
    log.log(elapsed_s=2.0)
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert datetime.fromisoformat(entry.pop("time")).utcoffset().total_seconds() == 0
    assert entry.pop("message").startswith("prompt 2.0 tok/s, generation 2.0 tok/s")
    assert entry == {
        "level": "info",
        "logger": "outdraft.server.logs",
        "prompt_tokens_per_s": 2.0,
        "generation_tokens_per_s": 2.0,
        "num_running": 2,
        "num_waiting": 0,
        "kv_cache_usage": 0.5,
        "prefix_cache_hit_rate": 0.75,
        "acceptance_length": 2.0,
        "acceptance_rate_by_source": {"suffix": 0.5},
    }


def test_a_traceback_is_part_of_its_json_line(stream):
    set_up_logging(LogLevel.INFO, stream, as_json=True)
    try:
        raise ValueError("broken\nin two lines")
    except ValueError:
        logging.getLogger("outdraft.anything").exception("failed %d times", 2)
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["message"]) == ("error", "failed 2 times")
    assert entry["exception"].endswith("ValueError: broken\nin two lines")


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("info", 3), ("error", 1)])
def test_the_level_is_the_least_that_is_logged(stream, level, count):
    set_up_logging(LogLevel(level), stream)
    for name in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("outdraft.anything"), name)("said")
    assert stream.getvalue().count("\n") == count


def test_setting_up_twice_logs_once(stream):
    set_up_logging(LogLevel.INFO, stream)
    set_up_logging(LogLevel.INFO, stream)
    logging.getLogger("outdraft.anything").info("said")
    assert stream.getvalue().count("said") == 1


def test_lines_come_while_the_log_runs(stream):
    set_up_logging(LogLevel.INFO, stream)
    counted = metrics()

    async def main() -> None:
        task = asyncio.create_task(TrafficLog(counted.registry).run(interval_s=0.01))
        await asyncio.sleep(0)
        counted.observe_steps(report(step((0,)), running=1))
        while not stream.getvalue():
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), timeout=60))
    assert "running 1" in stream.getvalue()


@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_of_a_request_is_logged_or_exposed(stream, as_json):
    set_up_logging(LogLevel.DEBUG, stream, as_json=as_json)
    counted = metrics()
    log = TrafficLog(counted.registry)
    serve_one(counted)
    Script(counted).gain(11.0, (1,))
    counted.observe_unfinished(1, FinishReason.ERROR)
    log.log(elapsed_s=1.0)
    exposed = repr(Exposed(counted).samples)
    assert "tok/s" in stream.getvalue()
    assert "prompt_tokens" in exposed
    for text in ("secret", "hidden", "7, 8, 9"):
        assert text not in stream.getvalue()
        assert text not in exposed
