"""A request that the only replica fails is told so: there is nobody else to send it to."""

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio

from outdraft.core.errors import EngineDeadError
from outdraft.core.sampling import SamplingParams
from outdraft.server.messages import Add, Command, EngineFailed, EngineInfo, Refused, Report
from outdraft.server.metrics import ReplicaMetrics
from outdraft.server.replicas.pool import ReplicaPool
from outdraft.server.replicas.switchboard import END, FRAME, HELLO, Address, Switchboard
from tests.cli.pair import pair

FAILED = EngineFailed("engine", "two steps failed")
REFUSED = Refused("", "engine", "a step failed")


def info() -> EngineInfo:
    path = str(pair().target)
    return EngineInfo(path, "float32", "cpu", 300, 100, [], [], 0, "", tokenizer_path=path)


async def answer(address: Address, to_request: Report) -> int:
    """The relay of an engine that has one answer to requests; how many of them came."""
    count = 0
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        url, socket.curve_serverkey = address
        socket.setsockopt(zmq.ROUTING_ID, b"alone")
        socket.connect(url)

        async def send(report: Report) -> None:
            await socket.send_multipart([FRAME, msgspec.msgpack.encode([report])])

        await socket.send_multipart([HELLO, b"here"])
        await send(info())
        while (frames := await socket.recv_multipart())[0] != END:
            if frames[0] != FRAME:
                continue
            command = msgspec.msgpack.decode(frames[1], type=Command)
            if isinstance(command, Add):
                count += 1
                report = to_request
                if isinstance(report, Refused):
                    report = msgspec.structs.replace(report, request_id=command.request_id)
                await send(report)
    return count


@pytest.mark.parametrize("report", [FAILED, REFUSED])
def test_a_request_that_the_only_replica_fails_is_not_sent_again(report: EngineFailed | Refused):
    async def ask() -> int:
        metrics = ReplicaMetrics("m")
        board = Switchboard("127.0.0.1", 0, 5.0)
        pool = ReplicaPool(board, 16, lambda _: None, lambda info: info, metrics)
        answering = asyncio.create_task(answer(pool.address, report))
        await pool.start(1)
        stream = pool.generate("id", pool.inputs.encoded("def"), SamplingParams())
        with pytest.raises(EngineDeadError, match=report.message):
            [_ async for _ in stream]
        assert pool.num_unfinished == 0
        pool.close("the test is over")
        await pool.run()
        return await answering

    assert asyncio.run(ask()) == 1
