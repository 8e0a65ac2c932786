"""The page for everybody: by keyboard, by screen reader, on a phone, by day and by night."""

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.dashboard.conftest import Site
from tests.dashboard.fake_openai import TEXT
from tests.dashboard.steps import facts

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dashboard")]  # one browser at a time

FOCUSED = "document.activeElement.id || document.activeElement.className"


def tab_to(page: Page, target: str) -> None:
    """Press Tab until the element with this id or class has the focus."""
    for _ in range(30):
        page.keyboard.press("Tab")
        if target in page.evaluate(FOCUSED).split():
            return
    raise AssertionError(f"Tab never reaches {target}")


def test_everything_can_be_done_without_a_pointer(page: Page):
    page.keyboard.press("Tab")
    assert page.evaluate(FOCUSED) == "skip"
    page.keyboard.press("Enter")
    tab_to(page, "compare")
    page.keyboard.press("Space")
    page.focus("#prompt")
    page.keyboard.type("def f(n):")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".verdict")).to_be_visible()
    assert page.text_content(".pane:first-child .output") == TEXT

    page.focus("#transcript")
    tab_to(page, "token")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.textContent") == ")"
    expect(page.locator("#detail del").first).to_be_visible()
    assert page.get_attribute(":focus", "aria-describedby") == "detail"
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_be_hidden()

    tab_to(page, "step")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#detail")).to_contain_text("Step 2, draft model: 2 of 3 accepted")


def test_the_views_are_tabs_for_the_keyboard(page: Page):
    page.focus("#tab-playground")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(FOCUSED) == "tab-live"
    expect(page.locator("#view-live")).to_be_visible()
    expect(page.locator("#view-playground")).to_be_hidden()
    assert page.get_attribute("#tab-live", "aria-selected") == "true"


def legend_of(chart: Locator) -> list[str]:
    return [" ".join(item.split()) for item in chart.locator("li").all_inner_texts()]


@pytest.mark.full
def test_the_charts_show_the_feed_and_the_arrow_keys_read_a_second(page: Page):
    page.click("#tab-live")
    expect(page.locator(".chart")).to_have_count(13)
    assert page.locator(".chart").filter(has=page.locator("path.area, path.line")).count() == 13
    plot = page.get_by_role("slider", name="Throughput: second to read")
    assert plot.get_attribute("aria-valuetext") == "now: 0 tokens/s"
    plot.focus()
    page.keyboard.press("ArrowLeft")
    assert plot.get_attribute("aria-valuetext") == "1 s ago: 40 tokens/s"
    assert legend_of(page.locator(".chart", has=plot)) == [
        "Model itself 10",
        "Prediction 0",
        "Suffix 20",
        "Draft model 10",
    ]
    page.keyboard.press("PageDown")
    assert plot.get_attribute("aria-valuenow") == "-1"  # there is no older second
    acceptance = page.get_by_role("slider", name="Acceptance length")
    acceptance.focus()
    page.keyboard.press("ArrowLeft")
    chart = page.locator(".chart", has=acceptance)
    expect(chart.locator(".chart-value")).to_have_text("4 tokens a draft")
    assert legend_of(chart) == [
        "All drafts 4",
        "Prediction –",
        "Suffix 3.50",
        "Draft model 6",
    ]
    time = page.get_by_role("slider", name="Where the time goes")
    time.focus()
    page.keyboard.press("ArrowLeft")
    assert time.get_attribute("aria-valuetext") == "1 s ago: 60 % verifying"


def test_the_charts_tell_latencies_and_what_speculation_is_worth(page: Page):
    page.click("#tab-live")
    for name, headline, legend in [
        ("Time to first token", "30.1 ms, median", ["Median 30.1", "95 % are faster than 202"]),
        ("Between tokens", "9.93 ms, median", ["Median 9.93", "95 % are faster than 9.93"]),
        (
            "Computing speed",
            "2.50 times as fast",
            ["Tokens/s of step time 40", "Without speculation, estimated 16"],
        ),
    ]:
        plot = page.get_by_role("slider", name=name)
        plot.focus()
        assert (plot.get_attribute("aria-valuetext") or "").startswith("now: –")
        page.keyboard.press("ArrowLeft")
        assert plot.get_attribute("aria-valuetext") == f"1 s ago: {headline}"
        assert legend_of(page.locator(".chart", has=plot)) == legend


@pytest.mark.full
def test_the_charts_tell_what_was_decided_and_how_right_it_was(page: Page):
    page.click("#tab-live")
    for name, headline, legend in [
        (
            "Steps by decision",
            "50 % of steps draft",
            [
                *("Drafting 50 %", "Trying out 0 %", "Off: no gain 50 %"),
                *("Off: lost time lately 0 %", "Off: no draft possible 0 %"),
            ],
        ),
        ("Step time", "1,000 ms", ["Measured 1,000", "Predicted 800"]),
        ("Price of a row", "0.25 accepted tokens", []),
        (
            "Acceptance curve",
            "50 % at position 1",
            ["Position 1 50 %", "Position 2 50 %", "Position 3 0 %", "Position 4 0 %"],
        ),
        ("Draft length", "6 tokens a draft", ["Drafted 6", "Granted 8"]),
    ]:
        plot = page.get_by_role("slider", name=f"{name}: second to read")
        plot.focus()
        page.keyboard.press("ArrowLeft")
        assert plot.get_attribute("aria-valuetext") == f"1 s ago: {headline}"
        assert legend_of(page.locator(".chart", has=plot)) == legend


@pytest.mark.full
def test_an_engine_without_speculation_is_compared_with_nothing(page: Page, site: Site):
    site.feed.facts = facts(num_speculative_tokens=0)
    page.reload()
    page.click("#tab-live")
    expect(page.locator(".chart")).to_have_count(8)
    expect(page.get_by_role("slider", name="Computing speed")).to_have_count(0)


@pytest.mark.full
@pytest.mark.parametrize("view", ["playground", "live"])
def test_every_control_has_a_name_and_every_reference_a_target(page: Page, view: str):
    page.check("#compare")
    page.fill("#prompt", "x")
    page.click("#run")
    page.wait_for_selector(".verdict:visible")
    page.click(f"#tab-{view}")
    controls = "button, input, select, textarea, [role=tab], [role=slider], [role=img]"
    for control in page.locator(f":is({controls}):visible").all():
        expect(control).not_to_have_accessible_name("")
    dangling = page.evaluate(
        """() => ["aria-controls", "aria-labelledby", "aria-describedby", "for"].flatMap((name) =>
          [...document.querySelectorAll(`[${name}]`)]
            .flatMap((each) => each.getAttribute(name).split(" "))
            .filter((id) => !document.getElementById(id)))"""
    )
    assert dangling == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(each => each.id)")
    assert len(ids) == len(set(ids))


def test_the_page_has_its_landmarks_language_and_one_title(page: Page):
    assert page.get_attribute("html", "lang") == "en"
    assert page.title() == "outdraft"
    expect(page.get_by_role("banner")).to_be_visible()
    expect(page.get_by_role("main")).to_be_visible()
    expect(page.get_by_role("complementary", name="Settings")).to_be_visible()
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
    assert page.locator("[tabindex]:not([tabindex='0']):not([tabindex='-1'])").count() == 0


@pytest.mark.full
def test_the_end_of_a_run_is_announced(page: Page):
    page.fill("#prompt", "x")
    page.click("#run")
    expect(page.get_by_role("status")).to_contain_text("Done: 25 tokens in ")


def test_nothing_moves_for_those_who_asked_for_it(page: Page):
    moving = page.evaluate(
        """[...document.querySelectorAll("*")].filter((each) => {
          const { transitionDuration, animationName } = getComputedStyle(each);
          return transitionDuration !== "0s" || animationName !== "none";
        }).length"""
    )
    assert moving == 0


@pytest.mark.full
def test_the_theme_follows_the_system_until_it_is_chosen(page: Page):
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(244, 243, 240)", "rgb(18, 20, 23)"
    assert page.evaluate(ground) == light
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ground) == dark
    page.click("#theme")
    assert page.get_attribute("#theme", "aria-label") == "Theme: light"
    assert page.evaluate(ground) == light
    page.reload()
    assert page.evaluate(ground) == light


@pytest.mark.full
@pytest.mark.parametrize("view", ["playground", "live"])
def test_a_phone_never_scrolls_sideways(browser: Browser, site: Site, view: str):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(site.url)
    page.fill("#prompt", "x" * 200)
    page.check("#compare")
    page.click("#run")
    page.wait_for_selector(".verdict:visible")
    page.click(f"#tab-{view}")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()
