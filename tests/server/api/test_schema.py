"""Requests made up from the OpenAPI document, valid and not: no reply is a server error."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error

from outdraft.server.api.app import create_app
from outdraft.server.api.settings import ApiContext, ApiSettings
from outdraft.text.chat import ChatTemplate
from tests.server.api.fake_engine import FakeEngine, fake_inputs
from tests.server.api.serving import MODEL, TEMPLATE

SETTINGS = ApiSettings(served_model_names=(MODEL,), tool_call_parser="hermes")
APP = create_app(ApiContext(FakeEngine(), fake_inputs(), ChatTemplate(TEMPLATE, {}), SETTINGS))
few = schemathesis.openapi.from_asgi("/openapi.json", APP)
few.config.phases.coverage.enabled = False  # hundreds of cases, one for every rule of the document
many = schemathesis.openapi.from_asgi("/openapi.json", APP)
repeatable = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}


@few.parametrize()
@settings(max_examples=10, **repeatable)
def test_no_request_makes_a_server_error(case):
    case.call_and_validate(checks=[not_a_server_error])


@pytest.mark.slow
@many.parametrize()
@settings(max_examples=100, **repeatable)
def test_none_of_many_requests_makes_a_server_error(case):
    case.call_and_validate(checks=[not_a_server_error])


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ChatRequest", {"messages", "tools", "prediction", "speculation", "top_k"}),
        ("CompletionRequest", {"prompt", "echo", "logprobs", "response_format"}),
        ("ResponsesRequest", {"input", "instructions", "max_output_tokens"}),
    ],
)
def test_the_document_describes_the_bodies(name, fields):
    described = few.raw_schema["components"]["schemas"][name]
    assert fields <= set(described["properties"])
    assert described["additionalProperties"] is False
