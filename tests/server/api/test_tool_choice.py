"""The schema of a call that the model has to make."""

import pytest

from outdraft.core.errors import RequestError
from outdraft.server.api.bodies import ChatRequest, Tool
from outdraft.server.api.calls import FORCED
from outdraft.server.api.settings import ApiSettings
from outdraft.server.api.tools import active_tools, call_format, call_schema


def tool(name: str, parameters: dict | None) -> Tool:
    function = {"name": name, "parameters": parameters}
    return Tool.model_validate({"type": "function", "function": function})


def test_a_server_may_leave_the_choice_of_calls_to_requests_alone():
    settings = ApiSettings(
        served_model_names=("m",), tool_call_parser="hermes", auto_tool_choice=False
    )
    messages = [{"role": "user", "content": "hi"}]
    called = {"type": "function", "function": {"name": "f"}}

    def format_of(choice):
        body = ChatRequest.model_validate(
            {"messages": messages, "tools": [called], "tool_choice": choice}
        )
        return call_format(body, active_tools(body), settings)

    assert format_of("none") is None
    assert format_of("required") == (FORCED, ["f"])
    assert format_of(called) == (FORCED, ["f"])
    for choice in ("auto", None):
        with pytest.raises(RequestError, match="--enable-auto-tool-choice"):
            format_of(choice)


def test_arguments_follow_the_functions_own_schema():
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    [call] = call_schema([tool("f", parameters), tool("g", None)], ["f"])["anyOf"]
    assert call["properties"] == {"name": {"const": "f"}, "arguments": parameters}
    assert call["required"] == ["name", "arguments"]


def test_definitions_move_to_where_references_look_for_them():
    parameters = {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object"}}}
    schema = call_schema([tool("f", parameters), tool("g", parameters)], ["f", "g"])
    assert schema["$defs"] == {"A": {"type": "object"}}
    assert [c["properties"]["arguments"] for c in schema["anyOf"]] == [{"$ref": "#/$defs/A"}] * 2


def test_definitions_that_contradict_each_other_are_refused():
    several = [tool(n, {"$defs": {"A": {"type": t}}}) for n, t in (("f", "object"), ("g", "null"))]
    with pytest.raises(RequestError, match="'A'"):
        call_schema(several, ["f", "g"])


def test_definitions_that_are_none_are_refused():
    with pytest.raises(RequestError, match="must be an object"):
        call_schema([tool("f", {"$defs": 5})], ["f"])
