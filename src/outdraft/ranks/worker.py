"""The process of a rank that is not rank 0.

`python -m outdraft.ranks.worker` reads its assignment from stdin.

Stdin stays open as long as the process is wanted: its end, for any reason, ends the process. It
follows rank 0's orders and does not answer in steps: there ranks exchange data in their groups.
The first process handles signals.
"""

import gc
import logging
import os
import pickle
import resource
import threading
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Never, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not name it

from outdraft.config.engine import EngineConfig
from outdraft.core import process
from outdraft.core.errors import ConfigError, RanksError
from outdraft.distributed.process_groups import join_ranks
from outdraft.kernels.choose import memory_transports
from outdraft.loading.machine import stay_on
from outdraft.loading.memory import plan_memory
from outdraft.loading.models import LoadedModels, build_runner, choose_device, load_models
from outdraft.ranks.messages import (
    LOST,
    STORE_TIMEOUT_S,
    WORKING,
    Build,
    Done,
    Join,
    Listener,
    Masks,
    Order,
    Prepare,
    RankAssignment,
    RankFailed,
    RunStep,
    as_bytes,
    order_of_bytes,
)
from outdraft.runner.model_runner import LaunchedStep, ModelRunner
from outdraft.runner.parallel_runner import SameSteps
from outdraft.runner.results import PendingStep

BEAT_S = 1.0
LEAST_CPU_SHARE = 0.01  # of one core; the beats themselves take less


@contextmanager
def signs_of_work(listener: Listener) -> Generator[None]:
    """Send rank 0 a message for every second of the block in which this process worked.

    To work is to compute or to read from a disk. No other code may use the listener meanwhile.
    """
    is_over = threading.Event()

    def beat() -> None:
        cpu_s, num_reads = _used()
        while not is_over.wait(BEAT_S):
            (before_s, before), (cpu_s, num_reads) = (cpu_s, num_reads), _used()
            if cpu_s - before_s > LEAST_CPU_SHARE * BEAT_S or num_reads > before:
                listener.send(WORKING)

    thread = threading.Thread(target=beat, name="signs-of-work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _used() -> tuple[float, int]:
    """Seconds of CPU time, and reads from a disk, of files that are mapped into memory too."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_inblock + used.ru_majflt


OrderType = TypeVar("OrderType", bound=Order)
_logger = logging.getLogger(__name__)


def main() -> int:
    """Work until rank 0 has no more need of it, or something goes wrong; return the exit code."""
    gc.disable()  # while it starts, next to nothing becomes garbage
    assignment: RankAssignment = process.assignment()
    logging.basicConfig(
        level=assignment.log_level,
        format=f"rank {assignment.rank}: %(levelname)s %(name)s: %(message)s",
    )
    listener = Listener(assignment.key, assignment.rank, assignment.address)
    code, last_word = _work(assignment, listener)
    listener.send(as_bytes(last_word))
    listener.close()
    return code


def _work(assignment: RankAssignment, listener: Listener) -> tuple[int, RankFailed]:
    """Work until something goes wrong; return the exit code and the last message."""
    try:
        stay_on(assignment.cores.cpus)
        torch.set_num_threads(assignment.cores.num_threads)
        _follow_orders(assignment, listener)
    except ConfigError as error:
        return 2, RankFailed("config", str(error))
    except RanksError as error:
        _logger.error("%s", error)
        return LOST, RankFailed("ranks", str(error))
    except Exception as error:
        _logger.exception("a rank failed")
        return 1, RankFailed("rank", type(error).__name__)


def _follow_orders(assignment: RankAssignment, listener: Listener) -> Never:
    """Follow the orders of rank 0 until something goes wrong.

    Raises:
        ConfigError, RanksError: why it cannot go on.
    """
    host, port = assignment.store
    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    store = TCPStore(host, port, is_master=False, timeout=timeout)
    listener.send(as_bytes(Done()))
    _next(listener, Join)
    with signs_of_work(listener):
        models = _models(assignment, store)
    listener.send(as_bytes(Done()))
    order = _next(listener, Prepare)
    while True:
        runner, same_steps = _built(listener, models, order)
        order = _step_until_prepare(listener, runner, same_steps)


def _models(assigned: RankAssignment, store: TCPStore) -> LoadedModels:
    config, parallel = assigned.config, assigned.config.parallel
    device = choose_device(config.device, assigned.device_index)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton's kernels run on it
    ranks = join_ranks(
        store,
        assigned.rank,
        parallel.tensor_parallel_size,
        config.draft_tensor_parallel_size,
        device,
        parallel.rank_timeout_s,
        memory_transports(),
        assigned.host,
    )
    return load_models(config, ranks, device)


def _built(
    listener: Listener, models: LoadedModels, order: Prepare
) -> tuple[ModelRunner, SameSteps | None]:
    config: EngineConfig = pickle.loads(order.pickled_config)
    models = models.as_used_by(config)
    with signs_of_work(listener):
        memory = plan_memory(config, models)
    listener.send(as_bytes(Done(memory)))
    num_blocks = _next(listener, Build).num_blocks
    with signs_of_work(listener):
        runner = build_runner(models, num_blocks)
    same_steps = None
    if config.parallel.check_ranks:
        same_steps = SameSteps(models.ranks.target, models.device)
    gc.collect()
    gc.freeze()  # a collection that visits what is there now would stall a step
    gc.enable()
    listener.send(as_bytes(Done()))
    return runner, same_steps


def _step_until_prepare(
    listener: Listener, runner: ModelRunner, same_steps: SameSteps | None
) -> Prepare:
    """Run steps; return the order that ends them.

    A launched step that no masks follow is dropped: rank 0 could not make them.
    """
    step: PendingStep | LaunchedStep | None = None
    while True:
        data = listener.receive()
        order = order_of_bytes(data)
        if isinstance(order, Prepare):
            return order
        if isinstance(order, Masks) and isinstance(step, LaunchedStep):
            step = runner.verify(step, order.allowed)
        else:
            step = runner.launch(_expected(RunStep, order).plan)
        if same_steps is not None:
            same_steps.add(data)
            if not isinstance(step, LaunchedStep):
                same_steps.check(runner.collect(step))


def _next(listener: Listener, kind: type[OrderType]) -> OrderType:
    return _expected(kind, order_of_bytes(listener.receive()))


def _expected(kind: type[OrderType], order: Order) -> OrderType:
    if not isinstance(order, kind):
        raise RanksError(f"rank 0 orders {type(order).__name__} where {kind.__name__} was due")
    return order


if __name__ == "__main__":
    os._exit(main())  # threads of the groups, which lost their peers, are not waited for
