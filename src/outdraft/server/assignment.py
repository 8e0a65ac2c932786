"""What the launcher gives to the engine process it starts."""

from dataclasses import dataclass

from outdraft.config.engine import EngineConfig


@dataclass(frozen=True, slots=True)
class Assignment:
    """Pickled: both ends are the same installation.

    Attributes:
        commands, reports: addresses of ZeroMQ; the process binds the first and connects to the
            second.
        log_level: of the logging module, in letters.
    """

    config: EngineConfig
    commands: str
    reports: str
    log_level: str
