"""The loop of the engine process, without the process."""

import json
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import zmq

from outdraft.core.errors import RanksError
from outdraft.core.outputs import RequestDelta
from outdraft.core.plan import StepPlan
from outdraft.core.sampling import SamplingParams
from outdraft.engine import profiler
from outdraft.engine.engine import Engine
from outdraft.engine.llm import LLM
from outdraft.server.engine_loop import MAX_PREPARING, EngineLoop
from outdraft.server.messages import (
    Abort,
    Add,
    Command,
    EndSequence,
    EngineFailed,
    Profile,
    Profiled,
    Progress,
    Refused,
    Report,
    Steps,
)
from tests.server.process.engines import config, offline

UNREADABLE = b""  # a command that ends a loop

Sockets = tuple[zmq.Socket[bytes], zmq.Socket[bytes], zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """Both ends of commands, both ends of reports."""
    with zmq.Context() as context:
        pairs = []
        for name in ("commands", "reports"):
            push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
            for socket in (push, pull):
                socket.set_hwm(0)
                socket.linger = 0
            push.bind(f"inproc://{name}")
            pull.connect(f"inproc://{name}")
            pairs.extend((push, pull))
        yield tuple(pairs)
        for socket in pairs:
            socket.close()


def engine(**options) -> Engine:
    return LLM.from_config(config(**options), offline().models).engine


def prompt(*token_ids: int) -> bytes:
    return np.array(token_ids, np.int32).tobytes()


def greedy(num_tokens: int, **changes) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **changes
    )


def run(loop: EngineLoop) -> bool:
    """Run until a command cannot be read, or until it fails; false if it did."""
    try:
        loop.run()
    except msgspec.DecodeError:
        return True
    return False


def live(core: Engine, sockets: Sockets, *commands: Command | None) -> tuple[bool, list[Report]]:
    """Run a loop on commands that are all there, None ends it; how it ended, and what it told."""
    push, pull, report_push, report_pull = sockets
    for command in commands:
        push.send(UNREADABLE if command is None else msgspec.msgpack.encode(command))
    ended_well = run(EngineLoop(core, pull, report_push))
    reports: list[Report] = []
    while report_pull.poll(0):
        reports.extend(msgspec.msgpack.decode(report_pull.recv(), type=list[Report]))
    return ended_well, reports


class Script:
    """Sends a command at the end of the n-th step, and ends the loop after the last one."""

    def __init__(self, core: Engine, sockets: Sockets, commands: dict[int, Command]) -> None:
        self._step, self._commands, self._push = core.step, commands, sockets[0]
        self.num_steps = 0
        self._core = core
        core.step = self.step

    def step(self):
        outputs = self._step()
        self.num_steps += 1
        if self.num_steps in self._commands:
            self._push.send(msgspec.msgpack.encode(self._commands[self.num_steps]))
        if not self._core.has_work:
            self._push.send(UNREADABLE)
        return outputs


def deltas_of(reports: list[Report], request_id: str) -> list[RequestDelta]:
    steps = [report for report in reports if isinstance(report, Progress)]
    return [one for step in steps for one in step.deltas if one.request_id == request_id]


def num_ended(delta: RequestDelta) -> int:
    return sum(part.finish_reason is not None for part in delta.sequences)


def test_a_request_is_reported_step_by_step_until_it_is_finished(sockets):
    core = engine()
    Script(core, sockets, {})
    ended_well, reports = live(core, sockets, Add("0", prompt(5, 6, 7), greedy(9)))
    deltas = deltas_of(reports, "0")
    assert ended_well
    assert [num_ended(delta) for delta in deltas] == [0] * (len(deltas) - 1) + [1]
    assert sum(len(part.token_ids) for delta in deltas for part in delta.sequences) == 9


def test_a_profile_holds_the_steps_between_its_begin_and_its_end(sockets, tmp_path, monkeypatch):
    push, pull, report_push, report_pull = sockets
    loop = threading.Thread(target=run, args=(EngineLoop(engine(), pull, report_push),))
    loop.start()

    def tell(command: Command, is_answer) -> Report:
        push.send(msgspec.msgpack.encode(command))
        while True:
            assert report_pull.poll(60_000), "no answer"
            for report in msgspec.msgpack.decode(report_pull.recv(), type=list[Report]):
                if is_answer(report):
                    return report

    def profile(path) -> str | None:
        command = Profile(None if path is None else str(path))
        return tell(command, lambda report: isinstance(report, Profiled)).error

    def complete(request_id: str) -> None:
        tell(
            Add(request_id, prompt(5, 6, 7), greedy(9)),
            lambda report: isinstance(report, Progress) and any(map(num_ended, report.deltas)),
        )

    path = tmp_path / "new" / "trace.json"
    try:
        assert profile(None) == "no profile is being taken"
        with monkeypatch.context() as broken:
            broken.delattr(profiler, "_phases")
            assert profile(tmp_path / "none") == "the profile could not be taken: NameError"
        complete("before")
        assert profile(path) is None
        assert profile(tmp_path / "other") == "a profile is being taken already"
        complete("within")
        assert profile(None) is None
        complete("after")
    finally:
        push.send(UNREADABLE)
        loop.join()
    events = json.loads(path.read_text())["traceEvents"]
    num_steps = sum(event["name"] == "step" and event["ph"] == "X" for event in events)
    assert 1 <= num_steps <= 10  # nine tokens, and no step of the other requests
    assert {"schedule", "verify", "commit"} <= {event["name"] for event in events}
    assert list(tmp_path.iterdir()) == [path.parent]


def test_statistics_cover_every_step_and_come_when_the_engine_gets_idle(sockets):
    core = engine()
    push, pull, report_push, report_pull = sockets
    push.send(msgspec.msgpack.encode(Add("0", prompt(5, 6, 7), greedy(30))))
    loop = threading.Thread(target=run, args=(EngineLoop(core, pull, report_push),))
    loop.start()
    news: list[Steps] = []
    while not news or sum(step.num_emitted for each in news for step in each.steps) < 30:
        assert report_pull.poll(20_000), "no statistics came although the engine is idle"
        reports = msgspec.msgpack.decode(report_pull.recv(), type=list[Report])
        news.extend(r for r in reports if isinstance(r, Steps))
    push.send(UNREADABLE)
    loop.join()
    assert sum(len(each.steps) for each in news) == core.stats.num_steps
    assert (news[-1].num_running, news[-1].num_waiting, news[-1].kv_usage) == (0, 0, 0.0)


def test_an_abort_ends_a_request_before_the_next_step(sockets):
    core = engine()
    Script(core, sockets, {3: Abort("0")})
    _, reports = live(
        core, sockets, Add("0", prompt(5, 6), greedy(90)), Add("1", prompt(5), greedy(8))
    )
    of_0 = deltas_of(reports, "0")
    assert len(of_0) == 3
    assert not num_ended(of_0[-1])
    assert core.scheduler.pool.usage == 0
    core.check_invariants()


def test_one_sequence_can_end_and_the_others_go_on(sockets):
    core = engine()
    Script(core, sockets, {2: EndSequence("0", 1, 1)})
    _, reports = live(core, sockets, Add("0", prompt(5, 6), greedy(40, n=3)))
    lengths = [0, 0, 0]
    for delta in deltas_of(reports, "0"):
        for part in delta.sequences:
            lengths[part.index] += len(part.token_ids)
    assert lengths[0] == lengths[2] == 40
    assert lengths[1] < 20
    core.check_invariants()


def test_requests_that_cannot_run_are_refused_and_harm_no_other(sockets):
    core = engine(max_waiting=2)
    Script(core, sockets, {})
    _, reports = live(
        core,
        sockets,
        Add("long", prompt(*[5] * 500), greedy(4)),
        Add("many", prompt(5), greedy(4, n=3)),
        Add("good", prompt(5), greedy(4, n=2)),
        Add("late", prompt(5), greedy(4)),
    )
    refused = {r.request_id: (r.kind, r.field) for r in reports if isinstance(r, Refused)}
    assert set(refused) == {"long", "many", "late"}
    assert refused["late"] == ("capacity", "")
    assert refused["many"][0] == "capacity"
    assert reports_finish(reports, "good", 2)


def test_a_failing_step_ends_what_ran_in_it_and_a_second_one_the_loop(sockets):
    core = engine(max_num_seqs=1)
    launch, failing = core.runner.launch, [True]

    def breaking(plan):
        if failing.pop():
            raise RuntimeError("secret text")
        failing.append(False)
        return launch(plan)

    core.runner.launch = breaking
    Script(core, sockets, {})
    failing.insert(0, False)
    adds = [Add("0", prompt(5), greedy(4)), Add("1", prompt(6), greedy(4))]
    ended_well, reports = live(core, sockets, *adds)
    [refused] = [r for r in reports if isinstance(r, Refused)]
    assert ended_well
    assert (refused.request_id, refused.kind) == ("0", "engine")
    assert "secret" not in refused.message
    assert reports_finish(reports, "1")


def test_the_loop_ends_with_the_second_failure_in_a_row(sockets):
    core = engine()

    def breaking(plan):
        raise RuntimeError("on fire")

    core.runner.launch = breaking
    ended_well, reports = live(
        core, sockets, *(Add(str(i), prompt(5), greedy(4)) for i in range(70))
    )
    assert not ended_well
    assert isinstance(reports[-1], EngineFailed)
    assert reports[-1].kind == "engine"
    assert "RuntimeError" in reports[-1].message


class LostRanks:
    """A rank ends as soon as somebody looks after it."""

    def __init__(self) -> None:
        self.has_ended = False

    def watch(self, on_death: Callable[[], None]) -> None:
        def end() -> None:
            self.has_ended = True
            on_death()

        threading.Timer(0.2, end).start()

    def check(self) -> None:
        if self.has_ended:
            raise RanksError("rank 1 of 2: its process was ended by SIGKILL")

    def end(self) -> None:
        raise AssertionError("nobody asked for that")


def test_an_idle_loop_that_loses_a_rank_says_which_and_ends(sockets: Sockets):
    core = engine()
    core.ranks = LostRanks()
    ended_well, reports = live(core, sockets)
    assert not ended_well
    assert reports == [EngineFailed("ranks", "rank 1 of 2: its process was ended by SIGKILL")]


def test_a_rank_that_ends_after_the_loop_does_not_touch_the_loops_sockets():
    deaths: list[Callable[[], None]] = []
    core = engine()
    core.ranks = LostRanks()
    core.ranks.watch = deaths.append
    with zmq.Context() as context:
        push, commands = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        reports = context.socket(zmq.PUSH)
        with push, commands, reports:
            push.bind("inproc://commands")
            commands.connect("inproc://commands")
            push.send(UNREADABLE)
            assert run(EngineLoop(core, commands, reports))
    assert context.closed
    (on_death,) = deaths
    on_death()


def test_the_loop_ends_with_the_first_step_that_loses_a_rank(sockets: Sockets):
    core = engine()

    def losing(plan: StepPlan):
        raise RanksError("rank 1 of 2: its process was ended by SIGKILL")

    core.runner.launch = losing
    ended_well, reports = live(core, sockets, Add("0", prompt(5), greedy(4)))
    assert not ended_well
    assert reports[-1] == EngineFailed("ranks", "rank 1 of 2: its process was ended by SIGKILL")
    assert not any(isinstance(report, Refused) for report in reports)


def reports_finish(reports: list[Report], request_id: str, num_sequences: int = 1) -> bool:
    return sum(map(num_ended, deltas_of(reports, request_id))) == num_sequences


def test_a_request_whose_grammar_is_compiled_is_passed_by_others_and_answered(sockets: Sockets):
    core = engine()
    prepare, may_go_on = core.prepare, threading.Event()

    def slow(params: SamplingParams) -> None:
        may_go_on.wait(30)
        prepare(params)

    core.prepare = slow
    form = {"kind": "regex", "text": "[ab]{3}"}
    push, pull, report_push, report_pull = sockets
    for command in (
        Add("form", prompt(5, 6, 7), greedy(20, structured=form)),
        Add("plain", prompt(5, 6, 7), greedy(3)),
        Add("given up", prompt(5, 6, 7), greedy(20, structured=form)),
        Add("bad", prompt(5, 6, 7), greedy(20, structured={"kind": "regex", "text": "(("})),
        Abort("given up"),
    ):
        push.send(msgspec.msgpack.encode(command))
    thread = threading.Thread(target=run, args=(EngineLoop(core, pull, report_push),))
    thread.start()
    ended: dict[str, Report] = {}
    while len(ended) < 3:
        assert report_pull.poll(30_000), ended
        for report in msgspec.msgpack.decode(report_pull.recv(), type=list[Report]):
            if isinstance(report, Refused):
                ended[report.request_id] = report
            elif isinstance(report, Progress):
                ended |= {one.request_id: report for one in report.deltas if num_ended(one)}
        if "plain" in ended:
            may_go_on.set()
    push.send(UNREADABLE)
    thread.join(30)
    assert not thread.is_alive()
    assert next(iter(ended)) == "plain"
    assert ended["bad"].field == "structured"
    assert "given up" not in ended
    assert isinstance(ended["form"], Progress)
    core.check_invariants()


def test_grammars_that_nobody_waits_for_are_not_compiled(sockets: Sockets):
    core, compiled = engine(), []

    def compile_slowly(params: SamplingParams):
        compiled.append(params.structured.text)
        time.sleep(0.01)  # the loop reads on meanwhile

    core.prepare = compile_slowly
    commands: list[Command] = []
    for i in range(3 * MAX_PREPARING):
        form = greedy(1, structured={"kind": "regex", "text": f"a{i}"})
        commands += [Add(str(i), prompt(5), form), Abort(str(i))]
    _, reports = live(core, sockets, *commands, None)
    assert not any(isinstance(report, Refused | Progress) for report in reports)
    assert len(compiled) < MAX_PREPARING


def test_grammars_that_wait_are_bounded(sockets: Sockets):
    core = engine()
    core.prepare = lambda params: threading.Event().wait(0.2)
    form = greedy(1, structured={"kind": "regex", "text": "a"})
    commands = [Add(str(i), prompt(5), form) for i in range(MAX_PREPARING + 3)]
    _, reports = live(core, sockets, *commands, None)
    refused = [report for report in reports if isinstance(report, Refused)]
    assert [report.kind for report in refused] == ["capacity"] * 3
