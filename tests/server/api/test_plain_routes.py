"""Models, tokens, health, version; who may ask for what."""

import re

import openai
import pytest

from tests.engine.byte_level import tokenizer
from tests.server.api.fake_engine import FakeEngine
from tests.server.api.serving import MODEL, plain_client, serve, wait_until


def test_models_are_listed_by_their_names(client):
    assert [model.id for model in client.models.list()] == [MODEL, "alias"]
    assert client.models.retrieve("alias").model_extra["max_model_len"] == 4096


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("some/other")


def test_answers_name_the_model_that_was_asked_for(served, client):
    assert client.completions.create(model="alias", prompt="a").model == "alias"
    assert served.post("/v1/completions", json={"prompt": "a"}).json()["model"] == MODEL


def test_texts_become_tokens_and_texts_again(served):
    reply = served.post("/tokenize", json={"prompt": "the 日", "return_token_strs": True}).json()
    ids = tokenizer().encode("the 日").ids
    assert reply["tokens"] == ids
    assert (reply["count"], reply["max_model_len"]) == (len(ids), 4096)
    assert len(reply["token_strs"]) == len(ids)
    assert served.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "the 日"}


def test_conversations_become_tokens(served):
    body = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}
    tokens = served.post("/tokenize", json=body).json()["tokens"]
    assert tokenizer().decode(tokens) == "<user>a"


@pytest.mark.parametrize("tokens", [[10**6], [-1], ["a"], 5])
def test_tokens_that_do_not_exist_have_no_text(served, tokens):
    assert served.post("/detokenize", json={"tokens": tokens}).status_code == 400


def test_the_version_is_the_packages(served):
    assert served.get("/version").json() == {"version": "0.1.0"}


def test_health_tells_death_and_draining():
    with serve(FakeEngine()) as served:
        assert served.get("/health").status_code == 200
        served.is_draining = True
        reply = served.get("/health")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")
        served.is_draining = False
        served.engine.is_alive = False
        reply = served.get("/health")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead")


def test_fields_that_a_body_leaves_open_are_as_the_model_wants_them():
    own = {"temperature": 0.6, "top_k": 20, "max_tokens": 7}
    with serve(FakeEngine(), default_sampling=own) as served:
        client = served.client()
        client.completions.create(model=MODEL, prompt="a")
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])
        client.responses.create(model=MODEL, input="a", temperature=0, max_output_tokens=3)
    chosen = [params for _, params, _ in served.engine.requests]
    assert [(p.temperature, p.top_k) for p in chosen] == [(0.6, 20), (0.6, 20), (0, 20)]
    assert [p.max_tokens for p in chosen] == [16, 7, 3]  # OpenAI documents the first one


def test_a_profile_is_taken_where_one_is_configured(tmp_path):
    with serve(FakeEngine(), profiler_dir=tmp_path, api_key="secret") as served:
        assert served.post("/start_profile").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        started = served.post("/start_profile", headers=headers)
        assert started.status_code == 200
        assert started.json()["path"] == served.engine.profiled
        assert served.engine.profiled.startswith(str(tmp_path))
        again = served.post("/start_profile", headers=headers)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "profile_conflict")
        assert served.post("/stop_profile", headers=headers).status_code == 200
        assert served.engine.profiled is None


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_without_a_profiler_there_is_no_such_path(served, path):
    assert served.post(path).status_code == 404


def test_ping_says_what_health_says():
    with serve(FakeEngine(), api_key="secret") as served:
        assert served.get("/ping").status_code == served.post("/ping").status_code == 200
        served.engine.is_alive = False
        assert served.get("/ping").status_code == served.post("/ping").status_code == 503


def test_the_load_is_the_number_of_requests_under_way():
    with serve(FakeEngine(stall_at=2)) as served:
        assert served.get("/load").json() == {"server_load": 0}
        body = {"model": MODEL, "prompt": ["a", "b", "c"], "stream": True}
        with served.client().completions.create(**body) as stream:
            next(iter(stream))
            wait_until(lambda: served.get("/load").json() == {"server_load": 3})
        wait_until(lambda: served.get("/load").json() == {"server_load": 0})


def test_a_response_that_was_given_cannot_be_fetched_again_and_the_error_says_why(client):
    given = client.responses.create(model=MODEL, input="a")
    for ask in (
        client.responses.retrieve,
        client.responses.delete,
        client.responses.cancel,
        lambda name: list(client.responses.input_items.list(name)),
    ):
        with pytest.raises(openai.NotFoundError, match=f"{given.id}.*stores none") as caught:
            ask(given.id)
        assert caught.value.code == "responses_not_stored"


def test_the_docs_name_every_path_and_field_and_load_nothing(served):
    page = served.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for loads in ("<script", "<link", "src=", "http:", "https:", "url("):
        assert loads not in page.text
    api = served.get("/openapi.json").json()
    for path, operations in api["paths"].items():
        for method in operations:
            assert f"<code>{method.upper()} {path}</code>" in page.text
    for name, schema in api["components"]["schemas"].items():
        assert f'id="{name}"' in page.text
        for field in schema.get("properties", ()):
            assert f"<b>{field}</b>" in page.text
    linked = set(re.findall('href="#([^"]+)"', page.text))
    assert linked <= set(api["components"]["schemas"])
    assert "CompletionRequest" in linked


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"]
)
def test_a_draining_server_takes_no_requests(path):
    with serve(FakeEngine()) as served:
        served.is_draining = True
        reply = served.post(path, json={})
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"


def test_only_the_right_key_opens():
    with serve(FakeEngine(), api_key="sécret") as served:
        assert served.get("/health").status_code == 200
        assert served.get("/version").status_code == 200
        for key in ("", "s", "Bearer", "Bearer wrong", "Bearer sécre", "sécret", "Basic sécret"):
            headers = {"Authorization": key.encode()}
            reply = served.get("/v1/models", headers=headers)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
            # before the body is looked at
            assert served.post("/v1/completions", content=b"{", headers=headers).status_code == 401
        headers = {"Authorization": "Bearer sécret".encode()}
        assert served.get("/v1/models", headers=headers).status_code == 200


def test_openais_client_sends_the_key():
    with serve(FakeEngine(), api_key="secret") as served:
        assert served.client().completions.create(model=MODEL, prompt="a").choices
        stranger = openai.OpenAI(
            base_url=f"{served.url}/v1", api_key="x", max_retries=0, http_client=plain_client()
        )
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_other_hosts_pages_may_ask_only_if_allowed(served):
    headers = {"Origin": "http://else.where"}
    assert "access-control-allow-origin" not in served.get("/v1/models", headers=headers).headers
    with serve(FakeEngine(), allowed_origins=("http://else.where",)) as open_server:
        reply = open_server.get("/v1/models", headers=headers)
        assert reply.headers["access-control-allow-origin"] == "http://else.where"
