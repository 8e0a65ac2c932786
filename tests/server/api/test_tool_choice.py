"""The schema of a call that the model has to make."""

import pytest

from outdraft.core.errors import RequestError
from outdraft.server.api.chat_types import Tool
from outdraft.server.api.tool_choice import call_schema


def tool(name: str, parameters: dict | None) -> Tool:
    function = {"name": name, "parameters": parameters}
    return Tool.model_validate({"type": "function", "function": function})


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
