from dataclasses import replace

import pytest

from outdraft.core.errors import RequestError
from outdraft.core.request import FinishReason, Request
from outdraft.core.sampling import SamplingParams
from outdraft.core.structured_outputs import (
    MAX_STRUCTURED_CHARS,
    StructuredOutput,
    StructuredOutputsParams,
)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"kind": "yaml"}, "must be one of json_object, json_schema, regex, grammar, choice"),
        ({"kind": ["regex"], "text": "a"}, "must be one of"),
        ({}, "needs a kind"),
        ({"kind": "regex"}, "takes a text"),
        ({"kind": "regex", "text": ""}, "takes a text"),
        ({"kind": "regex", "text": 5}, "must be a text"),
        ({"kind": "json_object", "text": "{}"}, "takes no text"),
        ({"kind": "regex", "text": "a" * (MAX_STRUCTURED_CHARS + 1)}, "more than 262,144"),
        ({"kind": "regex", "text": "\ud800"}, "not valid Unicode"),
        ({"kind": "regex", "txt": "a"}, "did you mean 'text'"),
        ("json_object", "StructuredOutput or a mapping"),
    ],
)
def test_a_wrong_form_is_refused_by_name(value, message):
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(structured=value)
    assert caught.value.field == "structured"


def test_a_mapping_is_the_same_as_the_object():
    params = SamplingParams(structured={"kind": "regex", "text": "é{3}"})
    assert params.structured == StructuredOutput("regex", "é{3}")
    assert SamplingParams(structured={"kind": "json_object"}).structured is not None


VLLMS = {
    "json": ({"json": {"type": "null"}}, StructuredOutput("json_schema", '{"type": "null"}')),
    "text": ({"json": "{}"}, StructuredOutput("json_schema", "{}")),
    "regex": ({"regex": "a+"}, StructuredOutput("regex", "a+")),
    "choice": ({"choice": ["a", "b"]}, StructuredOutput("choice", '["a", "b"]')),
    "grammar": ({"grammar": "start: /a/"}, StructuredOutput("grammar", "start: /a/")),
    "object": ({"json_object": True}, StructuredOutput("json_object")),
    "spaced": (
        {"json_object": True, "disable_any_whitespace": False},
        StructuredOutput("json_object", disable_any_whitespace=False),
    ),
}


@pytest.mark.parametrize("name", VLLMS)
def test_vllms_form_means_the_same_as_an_object_and_as_a_mapping(name):
    values, meant = VLLMS[name]
    asked = StructuredOutputsParams(**values)
    for given in (asked, values):
        params = SamplingParams(structured_outputs=given)
        assert (params.structured, params.structured_outputs) == (meant, asked)
        assert replace(params, n=2).structured == meant


@pytest.mark.parametrize(
    ("value", "message", "field"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object: got none", ""),
        ({"json_object": False}, "got none", ""),
        ({"regex": "a", "json": {}}, "got json, regex", ""),
        ({"regx": "a"}, "did you mean 'regex'", ""),
        ({"regex": ""}, "takes a text", ".regex"),
        ({"choice": []}, "a list of texts", ".choice"),
        ({"choice": "ab"}, "a list of texts", ".choice"),
        ({"choice": ["a", 1]}, "a list of texts", ".choice"),
        ({"json": {"a": {1}}}, "no JSON", ".json"),
        ("a+", "StructuredOutputsParams or a mapping", ""),
    ],
)
def test_a_wrong_vllm_form_is_refused_by_name(value, message, field):
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(structured_outputs=value)
    assert caught.value.field == "structured_outputs" + field


def test_two_forms_that_differ_are_refused():
    with pytest.raises(RequestError, match="different forms"):
        SamplingParams(structured=StructuredOutput("json_object"), structured_outputs=VLLM_REGEX)


VLLM_REGEX = StructuredOutputsParams(regex="a")


class Script:
    """A grammar of exactly one text."""

    def __init__(self, *token_ids: int) -> None:
        self._left = list(token_ids)
        self.failure: str | None = None

    @property
    def is_finished(self) -> bool:
        return not self._left and self.failure is None

    def advance(self, token_id: int) -> None:
        if self._left.pop(0) != token_id:
            self.failure = "another text"

    def fill_masks(self, token_ids, parents, masks_RW) -> None:
        raise AssertionError("nobody asks")


def request(grammar: Script, **changes) -> Request:
    params = SamplingParams(max_tokens=9, **changes)
    stops = frozenset({7})
    return Request(
        "r", [1], params, seed=0, max_model_len=50, stop_token_ids=stops, grammar=grammar
    )


@pytest.mark.parametrize("min_tokens", [0, 5])
def test_a_request_ends_where_its_grammar_is_finished(min_tokens: int):
    one = request(Script(3, 4), min_tokens=min_tokens)
    assert one.append(3) is None
    assert one.append(4) is FinishReason.STOP
    assert one.stop_reason is None


def test_a_request_ends_where_its_grammar_fails():
    one = request(Script(3, 4))
    assert one.append(3) is None
    assert one.failed() is None
    assert one.append(5) is FinishReason.ERROR
    assert one.failed() is FinishReason.ERROR
    assert one.error == "another text"


def test_a_stop_token_ends_it_before_the_grammar_is_asked():
    one = request(Script(3, 4), stop_token_ids=[7])
    assert one.append(7) is FinishReason.STOP
    assert one.stop_reason == 7
