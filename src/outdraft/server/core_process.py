"""The engine process. `python -m outdraft.server.core_process` reads its assignment from stdin.

Stdin stays open for as long as the process is wanted: its end, however it comes, ends the process.
Signals are for the launcher to judge, so a terminal's Ctrl-C does not reach the engine.
"""

import gc
import logging
import os
import sys
import threading
from contextlib import nullcontext
from functools import partial

import zmq

from outdraft.config.engine import EngineConfig
from outdraft.core import child_process
from outdraft.core.child_process import STOOD_STILL
from outdraft.core.errors import ConfigError, RanksError
from outdraft.server.engine_loop import EngineLoop, send_reports
from outdraft.server.messages import Assignment, EngineInfo, Failed, Loading
from outdraft.server.step_watch import StepWatch

# After so many timeouts of a rank in which nothing happened, rank 0 counts as stuck: if it waits
# for another one, that is told by name before. What a GPU compiles first takes seconds.
STILL_TIMEOUTS, LEAST_STILL_S = 3, 30.0
EXIT_S = 1.0
_logger = logging.getLogger(__name__)


def main() -> int:
    """Until the engine is told to stop; 0 if nothing went wrong."""
    gc.disable()  # while it starts, next to nothing becomes garbage
    assignment: Assignment = child_process.assignment()
    logging.basicConfig(level=assignment.log_level, format="%(levelname)s %(name)s: %(message)s")
    with zmq.Context() as context:
        commands, reports = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (commands, reports):
            socket.set_hwm(0)  # without bound: the other end merges what it has not read
        commands.bind(assignment.commands)
        reports.connect(assignment.reports)
        with commands, reports:
            return _serve(assignment.config, commands, reports)


def _serve(config: EngineConfig, commands: zmq.Socket[bytes], reports: zmq.Socket[bytes]) -> int:
    try:
        loop, watch, info = _start(config, commands, reports)
    except ConfigError as error:
        send_reports(reports, [Failed("config", str(error))])
        return 2
    except RanksError as error:
        send_reports(reports, [Failed("ranks", str(error))])
        return 1
    except Exception as error:
        _logger.exception("the engine could not start")
        send_reports(reports, [Failed("engine", f"{type(error).__name__}: {error}")])
        return 1
    gc.collect()
    gc.freeze()  # what is there now stays: a collection that looks through it stalls a step
    gc.enable()
    send_reports(reports, [info])
    with watch.watching() if watch is not None else nullcontext():
        return 0 if loop.run() else 1


def _start(
    config: EngineConfig, commands: zmq.Socket[bytes], reports: zmq.Socket[bytes]
) -> tuple[EngineLoop, StepWatch | None, EngineInfo]:
    send_reports(reports, [Loading("libraries")])
    # Not before there is somebody to tell how far it is: they take seconds.
    from outdraft.engine.build import build_engine, check_longest_text, warm_up
    from outdraft.loading.models import load_models, tokenizer_path
    from outdraft.models.modules import dtype_name

    send_reports(reports, [Loading("weights")])
    models = load_models(config)
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
    return EngineLoop(engine, commands, reports, watch), watch, info


def _end_still(timeout_s: float) -> None:
    """The other ranks end with this process, even if who is stuck has the lock of the log."""
    threading.Timer(EXIT_S, os._exit, (STOOD_STILL,)).start()
    _logger.error("rank 0 has stood still in a step for %g s", timeout_s)
    os._exit(STOOD_STILL)


if __name__ == "__main__":
    sys.exit(main())
