"""The steps of a run, in a real browser: the slider, the tree of a step, the probabilities."""

import math

import pytest
from playwright.sync_api import Page, expect

from tests.dashboard.conftest import Site
from tests.dashboard.fake_openai import ANSWER, LIKELY, ScriptedStep
from tests.dashboard.test_page import OUTPUT, run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dashboard")]  # one browser at a time


def rows(page: Page) -> list[str]:
    """What a screen reader says of each row."""
    return [" ".join(text.split()) for text in page.locator(".tree .node").all_text_contents()]


@pytest.mark.full
def test_the_slider_goes_through_the_steps_and_what_came_later_fades(page: Page):
    run(page)
    slider = page.get_by_role("slider", name="With speculation: step")
    assert slider.get_attribute("max") == str(len(ANSWER))
    assert slider.get_attribute("aria-valuetext") == (
        "Step 7 of 7, draft model: 1 of 3 accepted, 12.4 ms"
    )
    assert page.locator(".token.later").count() == 0
    slider.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == (
        "Step 2 of 7, draft model: 2 of 3 accepted, 12.4 ms"
    )
    expect(page.locator(".step-caption")).to_have_text(
        "Step 2 of 7, draft model: 2 of 3 accepted, 12.4 ms"
    )
    assert page.locator(f"{OUTPUT} .token:not(.later)").all_text_contents() == [
        *("if", " n", " <", " 2")
    ]
    assert page.locator(".token.marked").all_text_contents() == [" n", " <", " 2"]
    page.keyboard.press("End")
    assert page.locator(".token.later").count() == 0


@pytest.mark.full
def test_the_buttons_beside_the_slider_stop_at_both_ends(page: Page):
    run(page)
    back, forth = (page.get_by_role("button", name=f"{way} step") for way in ("Previous", "Next"))
    expect(forth).to_be_disabled()
    for _ in range(len(ANSWER) - 1):
        back.click()
    expect(back).to_be_disabled()
    expect(page.locator(".step-caption")).to_contain_text("Step 1 of 7, nothing drafted")
    forth.click()
    expect(page.locator(".step-caption")).to_contain_text("Step 2 of 7")


def test_a_step_that_is_chosen_shows_its_tree(page: Page):
    run(page)
    page.click(".step >> nth=1")
    assert page.locator(".step[aria-current=step]").all_inner_texts() == [
        page.locator(".step").nth(1).inner_text()
    ]
    assert rows(page) == [
        "ifrow 0, the token before the draft",
        "nrow 1, Draft model, accepted, behind row 0",
        "<row 2, Draft model, accepted, behind row 1",
        "2Recovered, the model itself, behind row 2",
        "0row 3, Draft model, rejected, behind row 2",
    ]
    page.focus(".step >> nth=1")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    assert rows(page) == [
        "the promptrow 0, the token before the draft",
        "ifPlain, the model itself, behind row 0",
    ]


@pytest.mark.full
def test_the_accepted_path_is_the_top_line_and_the_others_hang_below(page: Page):
    run(page)
    nodes = page.locator(".tree .node").evaluate_all(
        """all => all.map(({ className, offsetLeft, offsetTop, textContent }) =>
          [textContent.split(/row|Bonus/)[0], className.split(" ")[1], offsetLeft, offsetTop])"""
    )
    assert [node[:2] for node in nodes] == [
        ["2", "node-root"],
        [")", "node-accepted"],
        ["↵", "node-own"],
        ["]", "node-rejected"],
        [" +", "node-rejected"],
    ]
    (root, kept, own, wrong, behind) = ((left, top) for _, _, left, top in nodes)
    assert root[1] == kept[1] == own[1] < wrong[1] == behind[1]
    assert root[0] < kept[0] == wrong[0] < own[0] == behind[0]


def test_probabilities_stand_at_every_row_and_at_the_model_s_own_token(page: Page, site: Site):
    site.fake.answer = (LIKELY,)
    run(page)
    assert site.fake.bodies[0][1]["logprobs"] == 0
    assert rows(page) == [
        "the promptrow 0, the token before the draft",
        "xrow 1 75 %, Medusa, accepted, behind row 0",
        "zRecovered 25 %, the model itself, behind row 1",
        "prow 3 50 %, Medusa, rejected, behind row 1",
        "qrow 4 0.1 %, Medusa, rejected, behind row 1",
        "yrow 2 13 %, Medusa, rejected, behind row 0",
    ]
    widths = page.locator(".chance-fill").evaluate_all("all => all.map(each => each.style.width)")
    assert widths == ["75%", "25%", "50%", "0.1%", "12.5%"]


@pytest.mark.full
def test_a_chat_asks_for_probabilities_in_its_own_way(page: Page, site: Site):
    site.fake.answer = (LIKELY,)
    page.get_by_label("Chat", exact=True).check()
    run(page)
    assert site.fake.bodies[0][1]["logprobs"] is True
    assert "zRecovered 25 %, the model itself, behind row 1" in rows(page)


@pytest.mark.full
def test_nobody_pays_for_probabilities_while_times_are_compared_or_they_are_off(
    page: Page, site: Site
):
    page.check("#compare")
    run(page)
    page.uncheck("#compare")
    page.uncheck("#probabilities")
    run(page)
    assert len(site.fake.bodies) == 3
    assert all("logprobs" not in body for _, body in site.fake.bodies)


def test_a_text_that_ends_inside_a_draft_has_no_token_of_its_own(page: Page, site: Site):
    drafted = (("a", "suffix"), ("b", "suffix"), ("c", "suffix"))
    site.fake.answer = (ScriptedStep(drafted[:2], drafted, (0, 1, 2), (0, 1, 2)),)
    run(page)
    assert page.locator(".node-own").count() == 0
    assert page.locator(".node").count() == 4


@pytest.mark.full
def test_a_step_of_a_wide_tree_scrolls_inside_its_box(page: Page, site: Site):
    texts = tuple((f"token number {i}", "eagle") for i in range(40))
    site.fake.answer = (ScriptedStep((("x", "recovered"),), texts, tuple(range(40)), ()),)
    run(page)
    tree = page.get_by_role("group", name="With speculation: tree of the step")
    assert tree.evaluate("each => each.scrollWidth > each.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    tree.focus()
    assert page.evaluate("document.activeElement.className") == "tree"


@pytest.mark.parametrize(
    ("share", "words"),
    [(1.0, "100 %"), (0.999, ">99 %"), (0.5, "50 %"), (0.004, "0.4 %"), (1e-6, "<0.1 %")],
)
def test_a_probability_is_never_rounded_to_nothing_or_to_certainty(
    page: Page, share: float, words: str
):
    script = f"import('/dashboard/format.js').then((m) => m.probability({math.log(share)}))"
    assert page.evaluate(script) == words
