"""The page's colours can be read, and told apart, by day and by night, by everybody."""

import re
from itertools import combinations

import pytest

from outdraft.core.draft import DraftSource
from outdraft.core.outputs import TargetChoice
from tests.dashboard.colours import (
    DEFICIENCIES,
    SCHEMES,
    contrast,
    difference,
    palette,
    style,
    tint_share,
)

TEXT = 4.5  # WCAG AA
SHAPE = 3.0  # WCAG AA, of lines and borders that carry a meaning
APART = 12.0  # CIE 1976; 2.3 is just noticeable
ORIGINS = [str(origin).replace("_", "-") for origin in (*TargetChoice, *DraftSource)]


@pytest.fixture(name="scheme", params=SCHEMES)
def _scheme(request) -> str:
    return request.param


def test_text_is_readable_on_every_ground(scheme):
    colours = palette(scheme)
    for ground in ("page", "surface", "raised"):
        for text in ("ink", "ink-soft", "accent", "danger", "good"):
            assert contrast(colours[text], colours[ground]) >= TEXT, (text, ground)
    assert contrast(colours["on-accent"], colours["accent"]) >= TEXT


def test_the_borders_of_fields_can_be_seen(scheme):
    colours = palette(scheme)
    for ground in ("page", "surface"):
        assert contrast(colours["line-strong"], colours[ground]) >= SHAPE


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_token_is_readable_on_its_colour(scheme, origin):
    colours, share = palette(scheme), tint_share(scheme)
    for ground in ("page", "surface", "raised"):
        tint = share * colours[origin] + (1 - share) * colours[ground]
        assert contrast(colours["ink"], tint) >= TEXT


@pytest.mark.parametrize("origin", ORIGINS)
def test_the_line_at_a_token_can_be_seen(scheme, origin):
    colours = palette(scheme)
    for ground in ("page", "surface", "raised"):
        assert contrast(colours[origin], colours[ground]) >= SHAPE


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_origins_differ_in_colour_for_every_eye(scheme, deficiency):
    colours = palette(scheme)
    for left, right in combinations(ORIGINS, 2):
        assert difference(colours[left], colours[right], deficiency) >= APART, (left, right)


def test_origins_differ_without_any_colour():
    lines = re.findall(r"\.token\.origin-(\w+) \{ --origin-line: ([^;]+); \}", style("origins.css"))
    origins = {origin for origin, _ in lines}
    every = {*map(str, TargetChoice), *map(str, DraftSource)}
    assert origins == every - {"plain"}  # plain has no line
    assert len({line for _, line in lines}) == len(lines)


@pytest.mark.parametrize("source", DraftSource)
def test_every_source_has_its_series_and_every_origin_its_class(source):
    name = str(source).replace("_", "-")
    assert f".series-{source} {{ --series: var(--{name}); }}" in style("live.css")
    assert f".origin-{source} {{ --origin: var(--{name}); }}" in style("origins.css")
    assert f'["{source}", ' in style("origins.js")
