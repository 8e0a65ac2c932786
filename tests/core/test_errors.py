"""Hints of error messages."""

from enum import StrEnum

from outdraft.core.errors import did_you_mean


class Colour(StrEnum):
    GREEN = "green"
    RED = "red"


def test_members_of_an_enum_are_told_by_their_values():
    assert did_you_mean("gren", Colour) == "did you mean 'green'? known: green, red"


def test_a_name_that_is_close_to_none_gets_the_list_alone():
    assert did_you_mean("transparent", Colour) == "known: green, red"
