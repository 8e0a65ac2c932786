"""Starts, commands, watches and ends the other ranks of an engine, from rank 0's process."""

import logging
import pickle
import socket
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not name it

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError, PartedError, RanksError
from outdraft.core.grammar import AllowedTokens
from outdraft.core.plan import StepPlan
from outdraft.core.process import ChildProcess, Silence, ending
from outdraft.distributed.group import ONE_RANK, Ranks
from outdraft.distributed.process_groups import join_ranks
from outdraft.kernels.choose import memory_transports
from outdraft.loading.machine import stay_on, topology
from outdraft.loading.memory import MemoryPlan
from outdraft.loading.models import LoadedModels
from outdraft.ranks.launch import RankHosts
from outdraft.ranks.messages import (
    LOST,
    STORE_TIMEOUT_S,
    WORKING,
    Build,
    Done,
    Join,
    Masks,
    Order,
    Prepare,
    RankAssignment,
    RankFailed,
    RunStep,
    Speaker,
    answer_of_bytes,
    as_bytes,
)
from outdraft.runner.model_runner import ModelRunner
from outdraft.runner.parallel_runner import ParallelRunner, SameSteps

if TYPE_CHECKING:
    from outdraft.ranks.ray_hosts import RayProcess

POLL_S = 0.1  # between two looks for a process that died, while an answer is awaited
GRACE_S = 2.0  # for other ranks to end that lost the same one
LAST_WORDS_S = 0.2
LOADING_SILENCE_S = 60.0  # at least: disks that others use stand still for seconds

_logger = logging.getLogger(__name__)


class _Processes:
    """The processes by rank, and the exit codes of those that ended; threads wait for them."""

    def __init__(self) -> None:
        self.by_rank: dict[int, ChildProcess | RayProcess] = {}
        self.endings: dict[int, int] = {}
        self.changed = threading.Condition()
        self.on_death: list[Callable[[], None]] = []
        self._are_wanted = True

    def add(self, rank: int, process: "ChildProcess | RayProcess") -> None:
        self.by_rank[rank] = process
        args = rank, process
        threading.Thread(target=self._wait, args=args, name=f"rank-{rank}", daemon=True).start()

    def end(self) -> None:
        """Kill all that still run."""
        with self.changed:
            self._are_wanted = False
        for process in self.by_rank.values():
            process.kill()
        for process in self.by_rank.values():
            process.wait()

    def _wait(self, rank: int, process: "ChildProcess | RayProcess") -> None:
        code = process.wait()
        with self.changed:
            self.endings[rank] = code
            self.changed.notify_all()
            calls = self.on_death.copy() if self._are_wanted else []
        for call in calls:
            call()


class RankProcesses:
    """All ranks but rank 0, which is this process. The engine that was built last runs on them.

    They end with this object, with `end`, or with this process, however that ends.

    Attributes:
        num_engines: built on them.
    """

    def __init__(self, config: EngineConfig, hosts: RankHosts) -> None:
        """Start nothing yet."""
        self._config, self._size = config, config.parallel.tensor_parallel_size
        self._hosts = hosts
        self._processes = _Processes()
        self._failure: RanksError | None = None
        self.num_engines = 0
        self._num_sent = 0
        self._groups = ONE_RANK
        shown = f"[{hosts.host}]" if ":" in hosts.host else hosts.host
        self._speaker = Speaker(self._size, f"tcp://{shown}:*")
        parts = self._processes.end, self._speaker.close, hosts.close, _restores_threads()
        self._ending = weakref.finalize(self, _end, *parts)

    def start(self, device: torch.device) -> Ranks:
        """Start all processes and meet them; they begin to load their models.

        Raises:
            ConfigError, RanksError: one of them cannot.
        """
        if device.type == "cuda":
            torch.cuda.set_device(device)  # Triton's kernels run on it
        host = self._hosts.host
        store, port = _store(self._size, host)
        all_cores = self._hosts.cores(device)
        for rank in range(1, self._size):
            assignment = RankAssignment(
                self._config,
                rank,
                self._speaker.address,
                self._speaker.key,
                (host, port),
                all_cores[rank],
                logging.getLevelName(_logger.getEffectiveLevel()),
                host,
                device_index=rank,
            )
            self._processes.add(rank, self._hosts.start(assignment))
        self.answers(STORE_TIMEOUT_S)
        torch.set_num_threads(all_cores[0].num_threads)
        stay_on(all_cores[0].cpus)
        self._order(Join())
        timeout_s = self._config.parallel.rank_timeout_s
        draft_size = self._config.draft_tensor_parallel_size
        sizes = self._size, draft_size
        try:
            ranks = join_ranks(store, 0, *sizes, device, timeout_s, memory_transports(), host)
            self._groups = ranks
        except RanksError as error:
            self.give_up(error)
        self.watch(ranks.abort)  # shared memory does not show that the other rank has died
        self.check()
        return ranks

    def plan_together(self, config: EngineConfig, plan: Callable[[], MemoryPlan]) -> MemoryPlan:
        """Agree on a plan that all ranks have the memory for: the one with the fewest blocks.

        Args:
            plan: makes this rank's own; the others make theirs meanwhile.

        Raises:
            ConfigError, RanksError: one of them cannot.
        """
        self.num_engines += 1
        self._order(Prepare(pickle.dumps(config)))
        try:
            own = plan()
        except BaseException:
            self.end()
            raise
        answers = sorted(self.answers().items())
        return own.agreed([done.plan for _, done in answers if done.plan is not None])

    def build(self, num_blocks: int) -> None:
        """Order all ranks to take their memory, without waiting for it."""
        self._order(Build(num_blocks))

    def runner(self, own: ModelRunner, models: LoadedModels) -> ParallelRunner:
        """Return the runner of the engine that all ranks have built, over this rank's own runner.
        Raises ConfigError, RanksError."""
        self.answers()
        same_steps = None
        if models.config.parallel.check_ranks:
            same_steps = SameSteps(models.ranks.target, models.device)
        return ParallelRunner(own, _OneEngine(self, self.num_engines), same_steps)

    def send(self, message: StepPlan | AllowedTokens) -> bytes:
        """Send the ranks a step, or its masks; return the bytes.

        Raises:
            RanksError: one of them cannot do it.
        """
        self._num_sent += 1
        is_plan = isinstance(message, StepPlan)
        return self._order(RunStep(message) if is_plan else Masks.of(message))

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call a function, in another thread, when a rank's process has ended by itself."""
        self._processes.on_death.append(on_death)

    def num_moves(self) -> int:
        """Count messages to the ranks and collectives. Any thread may call it."""
        return self._num_sent + self._groups.num_messages

    def check(self) -> None:
        """Raise RanksError if the ranks cannot go on."""
        if self._failure is not None:
            raise self._failure
        if self._processes.endings:
            self.give_up(RanksError("a rank has ended"))

    def give_up(self, error: BaseException) -> NoReturn:
        """End all ranks after an error of rank 0; raise RanksError, which names the rank to blame.

        An error that is no Exception, such as KeyboardInterrupt, is raised as it is.
        """
        if self._failure is None:
            self._failure = self._blamed(error)
            self.end()
        if not isinstance(error, Exception):
            raise error  # the user's own
        raise self._failure from error

    def end(self) -> None:
        """End all other ranks; nothing of them is left."""
        if self._failure is None:
            self._failure = RanksError("the ranks were ended")
        self._ending()

    def _order(self, order: Order) -> bytes:
        self.check()
        data = as_bytes(order)
        try:
            self._speaker.send(data)
        except RanksError as error:
            self.give_up(error)
        return data

    def answers(self, timeout_s: float | None = None) -> dict[int, Done]:
        """Wait for the answer of every other rank, which may take long if it shows that it works.

        Args:
            timeout_s: without a sign of a rank; None: the time that loading ranks have.

        Raises:
            ConfigError, RanksError: one of them cannot do what it was ordered.
        """
        timeout_s = timeout_s or max(self._config.parallel.rank_timeout_s, LOADING_SILENCE_S)
        found: dict[int, Done] = {}
        silences = {rank: Silence(POLL_S) for rank in range(1, self._size)}
        while silences:
            rank, answer = self._heard() or (None, None)
            for other, silence in silences.items():
                if silence.look(is_broken=other == rank) > timeout_s:
                    what = f"rank {other}{self._state(other)} of {self._size}"
                    raise self._failed(f"{what} shows no sign of work for {timeout_s:g} s")
            if rank is not None and answer is not None and rank in silences:
                found[rank] = answer
                del silences[rank]
        return found

    def _heard(self) -> tuple[int, Done | None] | None:
        """Receive an answer, or a sign of work, with its rank; None: none came within POLL_S.

        Raises:
            ConfigError, RanksError: one of them has failed.
        """
        said = self._speaker.receive(POLL_S)
        if said is None:
            self.check()
            return None
        rank, answer = said[0], None if said[1] == WORKING else answer_of_bytes(said[1])
        if isinstance(answer, RankFailed):
            name = f"rank {rank} of {self._size}"
            if answer.kind == "config":
                raise ConfigError(str(self._failed(f"{name}: {answer.message}")))
            self.give_up(RanksError(f"{name} failed: {answer.message}"))
        return rank, answer

    def _failed(self, why: str) -> RanksError:
        """End all ranks; return the error that says why."""
        self._failure = RanksError(why)
        self.end()
        return self._failure

    def _blamed(self, error: BaseException) -> RanksError:
        """Make the error that names the rank to blame, and how it ended."""
        if isinstance(error, PartedError):
            return error
        if not isinstance(error, RanksError):
            return RanksError(f"rank 0 of {self._size} left a step: {type(error).__name__}")
        endings, last_words = self._look_around()
        for rank, failed in last_words.items():
            if failed.kind != "ranks":
                return RanksError(f"rank {rank} of {self._size} failed: {failed.message}")
        for rank, code in endings.items():
            if code != LOST:
                return RanksError(f"rank {rank} of {self._size}: {ending(code)}")
        silent = [
            rank
            for rank in self._processes.by_rank
            if rank not in endings and rank not in last_words
        ]
        if not silent:
            return RanksError(f"rank 0 of {self._size} kept the others waiting for too long")
        waited = f"for {self._config.parallel.rank_timeout_s:g} s"
        which = " and ".join(f"rank {rank}{self._state(rank)}" for rank in silent)
        return RanksError(f"{which} of {self._size} did not answer {waited}")

    def _look_around(self) -> tuple[dict[int, int], dict[int, RankFailed]]:
        """Return exit codes and last messages by rank; wait up to GRACE_S for further ends."""
        processes = self._processes

        def is_clear() -> bool:
            others = (code != LOST for code in processes.endings.values())
            return any(others) or len(processes.endings) == len(processes.by_rank)

        with processes.changed:
            processes.changed.wait_for(is_clear, GRACE_S)
            endings = processes.endings.copy()
        last_words: dict[int, RankFailed] = {}
        while (said := self._speaker.receive(LAST_WORDS_S)) is not None:
            if said[1] != WORKING and isinstance(answer := answer_of_bytes(said[1]), RankFailed):
                last_words[said[0]] = answer
        return endings, last_words

    def _state(self, rank: int) -> str:
        return " (its process is stopped)" if self._processes.by_rank[rank].is_stopped else ""


class _OneEngine:
    """The other ranks, for the runner of one engine."""

    def __init__(self, processes: RankProcesses, number: int) -> None:
        self.processes, self.number = processes, number

    def send(self, message: StepPlan | AllowedTokens) -> bytes:
        """Raises RanksError, too, if a newer engine was built on the ranks."""
        if self.number != self.processes.num_engines:
            self.processes.check()
            raise RanksError("a newer engine runs on these ranks")
        return self.processes.send(message)

    def give_up(self, error: BaseException) -> NoReturn:
        if self.number != self.processes.num_engines:
            raise error  # they have no part in it
        self.processes.give_up(error)


def _restores_threads() -> Callable[[], None]:
    """Return a function that gives this thread back the cores and the number of threads of now."""
    thread, number, cpus = threading.get_ident(), torch.get_num_threads(), tuple(topology())

    def restore() -> None:
        torch.set_num_threads(number)
        if threading.get_ident() == thread:
            stay_on(cpus)

    return restore


def _end(*parts: Callable[[], None]) -> None:
    """End all parts; log errors, which must neither hide the cause nor keep the rest."""
    for end in parts:
        try:
            end()
        except Exception:
            _logger.exception("something of the ranks is left")


def _store(size: int, host: str) -> tuple[TCPStore, int]:
    """Make the store where an engine's groups meet; return it and its port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    port: int = listening.getsockname()[1]
    store = TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, port
