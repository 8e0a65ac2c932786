"""A comparison is a race: both texts again, in real proportion, and the verdict in view."""

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.dashboard.conftest import Site
from tests.dashboard.fake_openai import ANSWER, TEXT, chain
from tests.dashboard.test_page import DONE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dashboard")]  # one browser at a time

LONG = ANSWER * 6  # a text longer than the window


def compare(page: Page) -> None:
    page.check("#compare")
    page.fill("#prompt", "def f(n):")
    page.click("#run")
    page.wait_for_selector(DONE)
    page.wait_for_selector(".verdict")


def seconds_of(page: Page) -> list[float]:
    """The totals of the two panes, in seconds."""
    texts = page.locator("[data-figure=total] dd").all_text_contents()
    return [float(text.split()[0]) / (1000 if text.endswith("ms") else 1) for text in texts]


@pytest.mark.full
@pytest.mark.parametrize("size", [(1280, 900), (1280, 640), (390, 844)])
def test_the_verdict_is_in_view_however_long_the_texts_are(
    browser: Browser, site: Site, size: tuple[int, int]
):
    site.fake.answer = LONG
    width, height = size
    page = browser.new_page(viewport={"width": width, "height": height}, reduced_motion="reduce")
    page.goto(site.url)
    compare(page)
    expect(page.locator(".verdict")).to_be_in_viewport(ratio=1)
    expect(page.locator(".race")).to_be_in_viewport(ratio=1)
    for pane in page.locator(".pane .output").all():
        expect(pane).to_be_in_viewport()
    page.close()


@pytest.mark.full
def test_the_slider_shows_how_far_both_were_at_the_same_time(page: Page):
    # 30 ms pass at each look at the clock, so chunks are as far apart on a busy machine as on this.
    page.evaluate("() => { let now = 0; performance.now = () => (now += 30); }")
    compare(page)
    speculating, plain = seconds_of(page)
    assert speculating < plain
    slider = page.get_by_role("slider", name="Time in the race")
    shown = ".pane:nth-child({}) .token:not(.unseen)"
    for share in (0, 250, 500, 1000):
        slider.fill(str(share))
        at = share / 1000 * plain
        texts = ["".join(page.locator(shown.format(i)).all_text_contents()) for i in (1, 2)]
        assert all(TEXT.startswith(text) for text in texts)
        assert len(texts[0]) >= len(texts[1])  # who is faster is never behind
        if share == 0:
            assert texts == ["", ""]
        if at > speculating + 0.01:
            assert texts[0] == TEXT
    assert texts == [TEXT, TEXT]


@pytest.mark.full
def test_a_race_keeps_the_proportion_of_the_measured_times(page: Page, site: Site):
    """At the same share of the race, each run has what had arrived by then, not a share of it."""
    shown = page.evaluate(
        """async () => {
          const { Run } = await import("/dashboard/run.js");
          const times = [0, 1, 2, 4, 7];
          const run = new Run(() => times.shift());
          const chunk = (text) => ({ text, tokens: [{ text, origin: null }], steps: [] });
          run.start();
          for (const text of ["a", "b", "c", "d"]) run.add(chunk(text));
          return [0, 0.99, 1, 3.9, 4, 6.99, 7, 100].map((at) => run.tokensAt(at));
        }"""
    )
    assert shown == [0, 0, 1, 2, 3, 3, 4, 4]
    factors = page.evaluate(
        "import('/dashboard/race.js').then((race) => [0.5, 5, 10, 15, 60].map(race.slowdown))"
    )
    assert factors == [10, 1, 1, 1, 0.25]


def test_the_race_runs_by_itself_and_can_be_stopped_and_played_again(browser: Browser, site: Site):
    site.fake.delay_s = 0.02
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(site.url)
    compare(page)
    button = page.locator(".race button")
    expect(button).to_have_text("Pause")
    hidden = page.locator(".pane .token.unseen")
    assert hidden.count() > 0
    button.click()
    expect(button).to_have_text("Play on")
    stopped = hidden.count()
    assert stopped > 0
    page.wait_for_timeout(100)
    assert hidden.count() == stopped
    button.click()
    expect(button).to_have_text("Replay")
    assert hidden.count() == 0
    page.close()


@pytest.mark.full
def test_nothing_but_the_text_moves_in_a_race_and_the_newest_token_is_in_view(
    page: Page, site: Site
):
    site.fake.answer = LONG
    site.fake.delay_s = 0.01  # tokens come all through the race, however fast the machine is
    compare(page)
    boxes = "all => all.map((each) => JSON.stringify(each.getBoundingClientRect()))"
    still = page.locator(".pane, .output, .race").evaluate_all(boxes)
    newest = page.locator(".pane:first-child .token:not(.unseen)").last
    output = page.locator(".pane:first-child .output")
    for at in (1000, 700, 300, 0, 500):
        page.get_by_role("slider", name="Time in the race").fill(str(at))
        if at == 0:
            assert newest.count() == 0
            continue
        top, bottom = newest.evaluate(
            "each => { const { top, bottom } = each.getBoundingClientRect(); return [top, bottom] }"
        )
        box = output.bounding_box()
        assert box is not None
        assert box["y"] - 1 <= top
        assert bottom <= box["y"] + box["height"] + 1
    assert page.locator(".pane, .output, .race").evaluate_all(boxes) == still


@pytest.mark.full
def test_nothing_races_by_itself_for_those_who_asked_for_stillness(page: Page):
    compare(page)
    expect(page.locator(".race button")).to_have_text("Replay")
    assert page.locator(".pane .token.unseen").count() == 0


@pytest.mark.full
def test_a_race_says_how_much_slower_it_is_shown(page: Page, site: Site):
    site.fake.answer = (chain("suffix", ["a"], 1, "b"),)
    compare(page)
    expect(page.locator(".race .hint")).to_contain_text("times slower.")
