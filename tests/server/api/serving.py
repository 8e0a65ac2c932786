"""The application behind a real socket, and a real client of it."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import openai
import uvicorn

from outdraft.server.api.app import create_app
from outdraft.server.api.settings import ApiContext, ApiSettings
from outdraft.server.launcher import bounded_http
from outdraft.text.chat import ChatTemplate
from tests.server.api.fake_engine import FakeEngine

MODEL = "tiny"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "[{{ call.function.name }} {{ call.function.arguments.items() | list }}]{% endfor %}"
    "{{ message.tool_call_id }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def plain_client() -> httpx.Client:
    """Without TLS, whose set-up takes longer than most tests."""
    return httpx.Client(trust_env=False, verify=False, timeout=60)


@dataclass
class Served:
    """A running server.

    Attributes:
        is_draining: may be changed while it runs.
    """

    engine: FakeEngine
    url: str = ""
    is_draining: bool = False
    api_key: str = "none"
    clients: list[openai.OpenAI] = field(default_factory=list)
    http: httpx.Client = field(default_factory=plain_client)

    def client(self) -> openai.OpenAI:
        client = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.api_key,
            max_retries=0,
            http_client=plain_client(),
        )
        self.clients.append(client)
        return client

    def post(self, path: str, **arguments) -> httpx.Response:
        return self.http.post(self.url + path, **arguments)

    def get(self, path: str, **arguments) -> httpx.Response:
        return self.http.get(self.url + path, **arguments)


@contextmanager
def serve(
    engine: FakeEngine, template: str | None = TEMPLATE, http: type | None = None, **settings
) -> Iterator[Served]:
    """Run the application in a thread, on a free port; `http`: the protocol of connections."""
    served = Served(engine, api_key=settings.get("api_key") or "none")
    context = ApiContext(
        engine,
        engine.inputs,
        None if template is None else ChatTemplate(template, {}),
        ApiSettings(**{"served_model_names": (MODEL, "alias"), **settings}),
        lambda: served.is_draining,
    )
    app = create_app(context)
    listener = socket.create_server(("127.0.0.1", 0))
    served.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        app, log_level="critical", lifespan="off", http=http or bounded_http(10, 60)
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield served
    finally:
        for client in [served.http, *served.clients]:
            client.close()
        server.should_exit = True
        thread.join(60)
        listener.close()


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
