"""Calls that run beside, and those that nobody waits for any more."""

import threading

import pytest

from outdraft.structured.time_limit import TimeLimit


def raise_value_error() -> None:
    raise ValueError("this one")


def test_outcomes_come_in_order_and_errors_end_nothing():
    with TimeLimit(60) as limit:
        outcomes = limit.run_all([lambda: 1, raise_value_error, lambda: 3])
        assert [result for result, _ in outcomes] == [1, None, 3]
        assert [type(error) for _, error in outcomes] == [type(None), ValueError, type(None)]
        assert limit.run(lambda: 4) == 4
        with pytest.raises(ValueError, match="this one"):
            limit.run(raise_value_error)
        assert limit.run_all([]) == []


def test_what_is_behind_a_call_that_takes_too_long_does_not_run():
    may_end, seen, others = threading.Event(), [], set(threading.enumerate())

    def never() -> None:
        while not may_end.is_set():
            pass

    with TimeLimit(0.01) as limit:
        outcomes = limit.run_all([lambda: seen.append(1), never, lambda: seen.append(3)])
        assert [type(error) for _, error in outcomes] == [type(None), TimeoutError]
        with pytest.raises(TimeoutError, match=r"0\.01 s"):
            limit.run(never)
        threads = set(threading.enumerate()) - others
        may_end.set()
        assert limit.run(lambda: 5) == 5
    assert len(threads) == 2
    for thread in threads:
        thread.join(60)
    assert seen == [1]


def test_a_call_may_wait_for_the_processor_as_long_as_it_computes_little():
    """Others may have the machine: the limit is of its own time."""
    with TimeLimit(0.01) as limit:
        assert limit.run(lambda: threading.Event().wait(0.1)) is False
