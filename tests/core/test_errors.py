"""Hints of error messages."""

from enum import StrEnum

import pytest

from outdraft.core.errors import closest_name, did_you_mean


class Colour(StrEnum):
    GREEN = "green"
    RED = "red"


def test_members_of_an_enum_are_told_by_their_values():
    assert did_you_mean("gren", Colour) == "did you mean 'green'? known: green, red"


def test_a_name_that_is_close_to_none_gets_the_list_alone():
    assert did_you_mean("transparent", Colour) == "known: green, red"


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("message", "messages"),
        ("prot", "port"),
        ("max_new_tokens", "max_tokens"),
        ("cache_prompt", None),  # not cache_salt
        ("n_probs", None),  # not logprobs
        ("documents", None),
    ],
)
def test_a_name_is_meant_to_be_one_that_differs_little(name, closest):
    known = ["messages", "port", "max_tokens", "cache_salt", "logprobs", "content"]
    assert closest_name(name, known) == closest
