"""What a client needs of an engine elsewhere: in another process, or on another machine."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from outdraft.core.errors import ConfigError, EngineDeadError
from outdraft.server.messages import Command, EngineInfo, Failed, Loading, Report

OnLoading = Callable[[Loading], None]
Result = TypeVar("Result")


class EngineLink(Protocol):
    """The way to an engine and back."""

    async def started(self, on_loading: OnLoading) -> EngineInfo:
        """Wait until the engine is ready.

        Raises:
            ConfigError: its configuration is to blame that it never will be.
            EngineDeadError: something else is.
        """
        ...

    async def receive(self) -> list[Report]:
        """What the engine tells next."""
        ...

    def send(self, command: Command) -> None:
        """Never waits: the engine reads commands between two steps."""
        ...

    async def while_alive(self, work: Coroutine[Any, Any, Result], told: str) -> Result:
        """What some work results in. Raises EngineDeadError, `told`, if the engine ends first."""
        ...

    def end(self) -> None:
        """End the engine if it still runs, and close everything."""
        ...


async def first_info(
    receive: Callable[[], Awaitable[list[Report]]], on_loading: OnLoading
) -> EngineInfo:
    """Read reports until the one that says that the engine is ready. Raises as `started`."""
    while True:
        for report in await receive():
            if isinstance(report, Loading):
                on_loading(report)
            elif isinstance(report, EngineInfo):
                return report
            elif isinstance(report, Failed):
                kind = ConfigError if report.kind == "config" else EngineDeadError
                raise kind(report.message)


async def unless_dead(
    work: Coroutine[Any, Any, Result], death: Coroutine[Any, Any, str], told: str
) -> Result:
    """What some work results in.

    Raises:
        EngineDeadError: `death` came first; what it returns says how the engine ended.
    """
    working, dying = asyncio.create_task(work), asyncio.create_task(death)
    try:
        await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise EngineDeadError(f"{told}: {dying.result()}", dying.result())
        return working.result()
    finally:
        working.cancel()
        dying.cancel()
        await asyncio.gather(working, dying, return_exceptions=True)
