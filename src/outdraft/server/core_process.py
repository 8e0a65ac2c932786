"""The engine process. `python -m outdraft.server.core_process` reads its assignment from stdin.

Stdin stays open for as long as the process is wanted: its end, however it comes, ends the process.
Signals are for the launcher to judge, so a terminal's Ctrl-C does not reach the engine.
"""

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import zmq

from outdraft.config.engine import EngineConfig
from outdraft.core import process
from outdraft.core.errors import ConfigError, RanksError
from outdraft.core.process import STOOD_STILL, Silence
from outdraft.server.engine_loop import EngineLoop, send_reports
from outdraft.server.messages import EngineFailed, EngineInfo, Loading

# After this number of timeouts of a rank in which nothing happened, rank 0 counts as stuck: if it
# waits for another one, an error names that one before. A GPU's first compilations take seconds.
STILL_TIMEOUTS, LEAST_STILL_S = 3, 30.0
EXIT_S = 1.0
POLLS = 10  # looks within the time that a step may stand still
_logger = logging.getLogger(__name__)


class StepWatch:
    """Calls a function, in its own thread, when a step of rank 0 has done nothing for too long.

    A step is entered as a context. Endless loops are noticed, and devices that never answer; not a
    call that holds Python's lock for ever.

    The other ranks notice within a step that rank 0 is silent, but rank 0 does not hear from them
    while it is stuck. Between two of its messages they wait for ever, since they cannot distinguish
    a step that is being planned from an engine that has nothing to do.
    """

    def __init__(
        self, num_moves: Callable[[], int], timeout_s: float, on_still: Callable[[], None]
    ) -> None:
        """
        Args:
            num_moves: changes while a step goes on.
            timeout_s: in which it has to change.
        """
        self._num_moves, self._timeout_s, self._on_still = num_moves, timeout_s, on_still
        self._num_steps = 0
        self._is_in_step = False

    def start(self) -> None:
        threading.Thread(target=self._look, name="step-watch", daemon=True).start()

    def __enter__(self) -> None:
        self._num_steps += 1
        self._is_in_step = True

    def __exit__(self, *_: object) -> None:
        self._is_in_step = False

    def _look(self) -> None:
        seen, silence = (0, 0), Silence(self._timeout_s / POLLS)
        is_still = False
        while not is_still:
            time.sleep(self._timeout_s / POLLS)
            now = self._num_steps, self._num_moves()
            has_moved, seen = now != seen, now
            is_broken = has_moved or not self._is_in_step
            is_still = silence.look(is_broken=is_broken) >= self._timeout_s
        self._on_still()


def main() -> int:
    """Run until something goes wrong; return the exit code."""
    gc.disable()  # while it starts, next to nothing becomes garbage
    config: EngineConfig
    config, commands_at, reports_at, log_level = process.assignment()
    logging.basicConfig(level=log_level, format="%(levelname)s %(name)s: %(message)s")
    with zmq.Context() as context:
        commands, reports = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (commands, reports):
            socket.set_hwm(0)  # without bound: the other end merges what it has not read
        commands.bind(commands_at)
        reports.connect(reports_at)
        with commands, reports:
            return _serve(config, commands, reports)


def _serve(config: EngineConfig, commands: zmq.Socket[bytes], reports: zmq.Socket[bytes]) -> int:
    try:
        loop, info = _start(config, commands, reports)
    except (ConfigError, RanksError) as error:
        is_config = isinstance(error, ConfigError)
        send_reports(reports, [EngineFailed("config" if is_config else "ranks", str(error))])
        return 2 if is_config else 1
    except Exception as error:
        _logger.exception("the engine could not start")
        send_reports(reports, [EngineFailed("engine", f"{type(error).__name__}: {error}")])
        return 1
    gc.collect()
    gc.freeze()  # what is there now stays: a collection that looks through it stalls a step
    gc.enable()
    send_reports(reports, [info])
    loop.run()
    return 1


def _start(
    config: EngineConfig, commands: zmq.Socket[bytes], reports: zmq.Socket[bytes]
) -> tuple[EngineLoop, EngineInfo]:
    send_reports(reports, [Loading("libraries")])
    # They take seconds, and the first report has to be sent before.
    from outdraft.engine.build import build_engine, check_longest_text, warm_up
    from outdraft.loading.models import tokenizer_path
    from outdraft.models.modules import dtype_name
    from outdraft.ranks.launch import load_on_ranks

    send_reports(reports, [Loading("weights")])
    models = load_on_ranks(config)
    send_reports(reports, [Loading("memory")])
    engine, memory = build_engine(config, models)
    check_longest_text(engine, memory)
    send_reports(reports, [Loading("kernels")])
    warm_up(engine)
    speculation = config.speculation
    info = EngineInfo(
        model_path=str(models.path),
        dtype=dtype_name(models.target.dtype),
        device=str(models.device),
        vocab_size=models.target.config.vocab_size,
        max_model_len=engine.inputs.max_model_len,
        eos_token_ids=list(engine.inputs.eos_token_ids),
        speculation_methods=[str(source) for source in engine.drafting.sources],
        num_speculative_tokens=speculation.max_drafts if speculation.sources else 0,
        memory=str(memory),
        tokenizer_path=str(tokenizer_path(config, models.path)),
        lossless=speculation.is_lossless,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        draft_tensor_parallel_size=config.draft_tensor_parallel_size,
    )
    watch: StepWatch | None = None
    if engine.ranks is not None:
        timeout_s = max(LEAST_STILL_S, STILL_TIMEOUTS * config.parallel.rank_timeout_s)
        watch = StepWatch(engine.ranks.num_moves, timeout_s, partial(_end_still, timeout_s))
        watch.start()
    return EngineLoop(engine, commands, reports, watch), info


def _end_still(timeout_s: float) -> None:
    """The other ranks end with this process, even if who is stuck has the lock of the log."""
    threading.Timer(EXIT_S, os._exit, (STOOD_STILL,)).start()
    _logger.error("rank 0 has stood still in a step for %g s", timeout_s)
    os._exit(STOOD_STILL)


if __name__ == "__main__":
    sys.exit(main())
