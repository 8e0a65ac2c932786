"""Replicas behind one client answer as one engine does, and the loss of one is noticed and told."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from outdraft.core.errors import ReplicaLostError, RequestError
from outdraft.core.sampling import SamplingParams
from tests.server.process.engines import PROMPTS, complete
from tests.server.replicas.replicas import LOST_AFTER_S, Pooled, pooled

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pool")]  # two replicas for most of them

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)  # about 0.5 s
SYSTEM = "def add(left, right):\n    return left + right\n\n\ndef subtract(left, right):\n"


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def two() -> Iterator[Pooled]:
    with pooled("a", "b") as result:
        yield result


def test_two_replicas_answer_as_one_engine_does(two):
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=24, n=2)
    asked = [(prompt, params) for prompt in PROMPTS for params in (GREEDY, seeded)]

    async def ask():
        return await asyncio.gather(*(two.output(*one) for one in asked))

    expected = complete(*zip(*asked, strict=True))
    for ours, theirs in zip(two.run(ask()), expected, strict=True):
        assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs]
        assert [one.text for one in ours.outputs] == [one.text for one in theirs.outputs]
    assert two.counted("routed_requests_total", replica="0") > 0
    assert two.counted("routed_requests_total", replica="1") > 0
    assert two.counted("routed_requests_total") == len(asked)
    assert two.counted("replicas") == 2


def test_a_prompt_finds_its_beginning_where_it_was_computed(two):
    async def ask():
        first = await two.output(SYSTEM + "    return", GREEDY)
        others = [await two.output(SYSTEM + end, GREEDY) for end in ("a", "b", "c")]
        salted = await two.output({"prompt": SYSTEM + "a", "cache_salt": "mine"}, GREEDY)
        return first, others, salted

    before = two.counted("routed_requests_total", by="prefix")
    _, others, salted = two.run(ask())
    assert all(one.num_cached_tokens > 0 for one in others)
    assert salted.num_cached_tokens == 0
    assert two.counted("routed_requests_total", by="prefix") == before + 3
    assert two.counted("prefix_cache_hits_total") >= sum(one.num_cached_tokens for one in others)


@pytest.mark.full
def test_all_numbers_are_exposed_once_for_each_replica(two):
    two.run(two.output("def", GREEDY))
    text = generate_latest(two.metrics.registry).decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        places = {sample.labels.get("replica") for sample in family.samples}
        alone = {"outdraft:replicas", "outdraft:retried_requests"}
        whole = family.name.removesuffix("_created") in alone
        assert places == ({None} if whole else {"0", "1"}), family.name


def test_times_of_a_replica_are_times_of_the_front_end(two):
    times = two.run(two.output("def times", GREEDY)).metrics
    assert times.arrival_s <= times.first_scheduled_s
    assert times.first_token_s <= times.last_token_s <= times.finished_s
    assert times.first_scheduled_s - times.arrival_s < 3600


def test_a_request_that_can_never_run_is_refused_once(two):
    before = two.counted("retried_requests_total")
    with pytest.raises(RequestError):
        two.run(two.output("def", SamplingParams(logit_bias={10**6: 1.0})))
    assert two.counted("retried_requests_total") == before
    assert two.pool.num_unfinished == 0


def test_a_lost_engine_costs_only_what_it_had_begun(two):
    """Requests that wait at the dead engine are answered by the other one."""
    expected = complete(["def"], [LONG])[0].outputs[0].token_ids

    async def kill_one():
        prompt = two.pool.inputs.encoded("def")
        stream = two.pool.generate("id", prompt, LONG)
        await anext(stream)
        [name] = [name for name, one in two.pool.clients.items() if one.num_unfinished]
        os.kill(two.engine(name), signal.SIGSTOP)
        others = [asyncio.create_task(two.output("def", LONG)) for _ in range(4)]
        while two.pool.num_unfinished < 5:
            await asyncio.sleep(0)
        waiting = two.pool.clients[name].num_unfinished - 1
        os.kill(two.engine(name), signal.SIGKILL)
        with pytest.raises(ReplicaLostError) as lost:
            [update async for update in stream]
        return lost.value, waiting, await asyncio.gather(*others)

    retried = two.counted("retried_requests_total")
    error, num_waiting, outputs = two.run(kill_one())
    assert error.ended_by.startswith("its process was ended by SIGKILL")
    assert num_waiting > 0
    assert two.counted("retried_requests_total") == retried + num_waiting
    assert [one.outputs[0].token_ids for one in outputs] == [expected] * 4
    assert two.counted("replicas") == 1
    assert two.pool.is_alive
    assert two.pool.num_unfinished == 0


def test_a_new_replica_takes_the_place_of_a_lost_one(two):
    async def both():
        return await asyncio.gather(two.output("one", GREEDY), two.output("two", GREEDY))

    two.add("c")
    two.run(until(lambda: len(two.pool.clients) == 2))
    assert two.counted("replicas") == 2
    before = [two.counted("routed_requests_total", replica=place) for place in "01"]
    outputs = two.run(both())
    after = [two.counted("routed_requests_total", replica=place) for place in "01"]
    assert [new - old for old, new in zip(before, after, strict=True)] == [1, 1]
    assert all(one.finished for one in outputs)


def test_a_replica_that_leaves_ends_what_it_has_and_gets_no_more(two):
    expected = complete(["def"], [LONG])[0].outputs[0].token_ids

    async def leave():
        stream = two.pool.generate("id", two.pool.inputs.encoded("def"), LONG)
        await anext(stream)
        [name] = [name for name, one in two.pool.clients.items() if one.num_unfinished]
        os.kill(two.replicas[name].pid, signal.SIGUSR1)
        updates = [update async for update in stream]
        await asyncio.to_thread(two.replicas[name].join, 60)
        await until(lambda: len(two.pool.clients) == 1)
        return name, updates[-1].output, await two.output("def", GREEDY)

    name, output, after = two.run(leave())
    assert output.outputs[0].token_ids == expected
    assert two.replicas[name].exitcode == 0
    assert after.finished
    two.add("d")
    two.run(until(lambda: len(two.pool.clients) == 2))


def test_a_silent_replica_counts_as_lost_and_is_not_taken_back(two):
    async def cut_off():
        stream = two.pool.generate("id", two.pool.inputs.encoded("unheard of"), LONG)
        await anext(stream)
        await anext(stream)  # a token, so that the answer has begun
        [name] = [name for name, one in two.pool.clients.items() if one.num_unfinished]
        os.kill(two.replicas[name].pid, signal.SIGSTOP)
        with pytest.raises(ReplicaLostError, match="nothing was heard") as lost:
            [update async for update in stream]
        again = await two.output("unheard of", GREEDY)
        os.kill(two.replicas[name].pid, signal.SIGCONT)
        await asyncio.to_thread(two.replicas[name].join, 60)
        return name, lost.value, again

    name, error, again = two.run(cut_off())
    assert f"node of {name} for {LOST_AFTER_S:g} s" in error.ended_by
    assert again.finished
    assert two.replicas[name].exitcode == 0  # it was told to end


@pytest.mark.full
def test_a_replica_whose_engine_is_stopped_counts_as_lost():
    with pooled("alone", rank_timeout_s=1.0) as one:

        async def stop():
            prompt = one.pool.inputs.encoded("def")
            stream = one.pool.generate("id", prompt, LONG)
            await anext(stream)
            os.kill(one.engine("alone"), signal.SIGSTOP)
            with pytest.raises(ReplicaLostError) as lost:
                [update async for update in stream]
            return lost.value

        error = one.run(stop())
        assert error.ended_by == "its process was stopped for 1 s"
        assert one.counted("replicas") == 0
        one.replicas["alone"].join(60)
        assert one.replicas["alone"].exitcode == 0
