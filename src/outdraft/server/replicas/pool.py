"""Several engines that are alike, behind one client: a request goes to one of them, and to another
one if that is lost."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from itertools import count

from outdraft.core.errors import EngineDeadError, ReplicaLostError
from outdraft.core.request import block_salt
from outdraft.core.sampling import SamplingParams
from outdraft.engine.inputs import EncodedPrompt, InputProcessor
from outdraft.kv.block_pool import extend_hashes
from outdraft.server.client import OnLoading, Update
from outdraft.server.messages import EngineInfo
from outdraft.server.metrics import ReplicaMetrics
from outdraft.server.process_client import Supervisor, input_processor_of
from outdraft.server.replicas.router import PrefixRouter, Route
from outdraft.server.replicas.switchboard import Address, RemoteEngine, Switchboard
from outdraft.server.trace_file import TraceFile

EXPECTED_TOKENS = 256  # an output counts as no longer than that: its end is not known before
ATTEMPTS = 2

_logger = logging.getLogger(__name__)


class ReplicaPool:
    """An `EngineClient` of all replicas that call.

    A request whose replica is lost before it brought anything is sent to another one, once.

    Args:
        block_size: tokens of a block of the engines' prefix caches.
        on_loading: is called with the stages of replicas that start.
        localised: the same facts with paths of this machine.
    """

    info: EngineInfo  # of the replica that was ready first, as the next; from `start` on
    inputs: InputProcessor

    def __init__(
        self,
        switchboard: Switchboard,
        block_size: int,
        on_loading: OnLoading,
        localised: Callable[[EngineInfo], EngineInfo],
        metrics: ReplicaMetrics,
    ) -> None:
        self._switchboard = switchboard
        self._block_size = block_size
        self._on_loading = on_loading
        self._localised = localised
        self._metrics = metrics
        self._trace: TraceFile | None = None
        self._is_known = False
        self._router = PrefixRouter(block_size)
        self.clients: dict[str, Supervisor] = {}  # by name; those that leave included
        self._places: dict[str, int] = {}  # of the same replicas, for metrics
        self._lives: set[asyncio.Task[None]] = set()
        self._calls: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._is_closed = False
        self._failure: Exception | None = None
        self.num_unfinished = 0
        self.ended_by: str | None = None  # of the replica that ended last

    @property
    def address(self) -> Address:
        """The address that replicas have to call."""
        return self._switchboard.address

    @property
    def is_alive(self) -> bool:
        return bool(self._router.replicas)

    def record(self, trace: TraceFile) -> None:
        """Have every attempt at a request written down from now on."""
        self._trace = trace

    async def start(self, num_replicas: int) -> None:
        """Wait until `num_replicas` are ready.

        Raises:
            ConfigError, EngineDeadError: one of them could not start.
        """
        self._calls = asyncio.create_task(self._switchboard.run(self._arrived))
        self._calls.add_done_callback(lambda _: self._changed.set())
        while len(self._router.replicas) < num_replicas:
            await self._changed.wait()
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            if self._calls.done():
                self._calls.result()  # calls of replicas are not heard any more

    async def run(self) -> None:
        """Until it is closed. A pool without replicas waits for some."""
        assert self._calls is not None
        await asyncio.wait({self._calls})
        if not self._is_closed:
            self._calls.result()

    def close(self, cause: str) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for client in self.clients.values():
            client.close(cause)
        for task in (*self._lives, self._calls):
            if task is not None:
                task.cancel()
        self._switchboard.close()

    async def generate(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, priority: int = 0
    ) -> AsyncGenerator[Update]:
        hashes: list[bytes] = []  # names of the prompt's full blocks, as of the engines' caches
        num_prompt, salt = len(prompt.token_ids), block_salt(prompt.cache_salt)
        extend_hashes(hashes, prompt.token_ids, self._block_size, num_prompt, salt)
        num_output = params.n * min(params.max_tokens or EXPECTED_TOKENS, EXPECTED_TOKENS)
        avoided: set[str] = set()
        self.num_unfinished += 1
        try:
            while True:
                route = self._router.route(hashes, num_prompt + num_output, avoided)
                if route is None:
                    raise EngineDeadError("there is no replica", self.ended_by)
                self._metrics.routed(self._places[route.replica], route.num_matched)
                has_begun = False
                try:
                    client = self.clients[route.replica]
                    stream = client.generate(request_id, prompt, params, priority)
                    async with aclosing(stream) as updates:
                        async for update in updates:
                            if update.deltas:
                                self._settle(route, update, num_output, is_first=not has_begun)
                                has_begun = True
                            yield update
                    return
                except EngineDeadError as error:
                    avoided.add(route.replica)
                    if has_begun:
                        raise ReplicaLostError(str(error), error.ended_by) from error
                    others = set(self._router.replicas) - avoided
                    if not others or len(avoided) == ATTEMPTS or self._is_closed:
                        raise
                    self._metrics.retried()
                finally:
                    self._router.end(route)
        finally:
            self.num_unfinished -= 1

    async def profile(self, path: str | None) -> str | None:
        return "steps of several replicas cannot be traced"

    def _arrived(self, engine: RemoteEngine) -> None:
        life = asyncio.create_task(self._live(engine))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)

    async def _live(self, engine: RemoteEngine) -> None:
        """A replica's life."""
        client = Supervisor(
            lambda: engine, self._on_loading, restarts=False, input_processor=self._inputs_for
        )
        engine.num_requests = lambda: client.num_unfinished
        if self._trace is not None:
            client.record(self._trace)
        try:
            await client.start()
        except Exception as error:  # whatever it is, `start` raises it
            _logger.error("a replica on %s could not start: %s", engine.node, error)
            client.close("it could not start")
            self._failure = error
            self._changed.set()
            return
        place = next(number for number in count() if number not in self._places.values())
        self._metrics.joined(place, client)
        self.clients[engine.name], self._places[engine.name] = client, place
        self._router.join(engine.name)
        self._changed.set()
        _logger.info("replica %d on %s is ready", place, engine.node)
        leaving = asyncio.create_task(self._let_go(engine))
        try:
            await client.run()
        finally:
            leaving.cancel()
            self._router.leave(engine.name)
            del self.clients[engine.name], self._places[engine.name]
            self.ended_by = client.ended_by
            self._metrics.left(place)
            cause = f": {client.ended_by}" if client.ended_by else ""
            _logger.info("replica %d on %s has ended%s", place, engine.node, cause)

    async def _let_go(self, engine: RemoteEngine) -> None:
        """Wait until a replica wants no more requests, then until it has none, then end it."""
        await engine.is_leaving.wait()
        self._router.leave(engine.name)
        client = self.clients[engine.name]
        _logger.info(
            "replica %d on %s is not needed any more: it has %d requests left",
            self._places[engine.name],
            engine.node,
            client.num_unfinished,
        )
        while client.num_unfinished:
            await asyncio.sleep(0.05)
        client.close("it has left")

    def _inputs_for(self, info: EngineInfo) -> InputProcessor:
        """In a thread. Replicas are alike: the first one's facts are those of all."""
        if not self._is_known:
            self.info = self._localised(info)
            self.inputs = input_processor_of(self.info)
            self._is_known = True
        return self.inputs

    def _settle(self, route: Route, update: Update, num_output: int, *, is_first: bool) -> None:
        num_done = sum(len(delta.token_ids) for delta in update.deltas)
        if is_first:  # the prompt is computed
            num_done += max(0, route.left_tokens - num_output)
        self._router.settle(route, num_done)
