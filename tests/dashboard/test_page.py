"""The playground in a real browser."""

import ast
from collections import Counter

import pytest
from playwright.sync_api import Page, expect

from outdraft.core.draft import DraftSource
from outdraft.core.outputs import TargetChoice
from tests.dashboard.conftest import FACTS, Site
from tests.dashboard.fake_openai import ANSWER, API_KEY, HEADS, MIXED, TEXT, ScriptedStep
from tests.dashboard.steps import facts

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dashboard")]  # one browser at a time

OUTPUT = ".pane:first-child .output"
DONE = ".pane:last-child[data-state=stop]"


def run(page: Page, prompt: str = "def f(n):") -> None:
    page.fill("#prompt", prompt)
    page.click("#run")
    page.wait_for_selector(DONE)


def test_every_token_carries_its_origin_and_the_text_is_whole(page: Page, site: Site):
    run(page)
    tokens = page.locator(f"{OUTPUT} .token")
    origins = tokens.evaluate_all("all => all.map(each => each.dataset.origin)")
    assert origins == [origin for step in ANSWER for _, origin in step.tokens]
    assert page.text_content(OUTPUT) == TEXT
    route, body = site.fake.bodies[0]
    assert route == "completions"
    assert body["prompt"] == "def f(n):"
    assert body["model"] == "scripted"
    assert body["stream"] is True
    assert body["speculation"] == {"trace": True}


@pytest.mark.full
def test_every_origin_looks_different_with_and_without_colour(page: Page, site: Site):
    site.fake.answer = ANSWER + HEADS
    run(page)
    looks = page.locator(f"{OUTPUT} .token").evaluate_all(
        """all => all.map((each) => {
          const style = getComputedStyle(each);
          const line = `${style.textDecorationLine} ${style.textDecorationStyle}`;
          return [each.dataset.origin, style.backgroundColor, line];
        })"""
    )
    for look in (1, 2):
        by_origin = {entry[0]: entry[look] for entry in looks}
        assert by_origin.keys() == {*TargetChoice, *DraftSource}
        assert len(set(by_origin.values())) == len(by_origin)


def test_rejected_guesses_are_struck_out_under_the_pointer(page: Page):
    run(page)
    page.hover(f"{OUTPUT} .token[data-origin=recovered] >> nth=1")  # "fibonacci" for " n"
    detail = page.locator("#detail")
    expect(detail).to_be_visible()
    assert detail.locator("ins").all_inner_texts() == [" n", "↵", "    ", "return"]
    assert detail.locator("del").all_inner_texts() == [" n"]
    line = detail.locator("del").evaluate("each => getComputedStyle(each).textDecorationLine")
    assert line == "line-through"
    expect(detail).to_contain_text("Step 4, suffix: 4 of 5 accepted, 14.1 ms")
    page.hover("h1")
    expect(detail).to_be_hidden()


@pytest.mark.full
def test_a_tree_shows_its_branches_the_accepted_one_first(page: Page):
    run(page)
    page.hover(f"{OUTPUT} .token[data-origin=draft_model] >> nth=-1")
    branches = page.locator("#detail .branches li").all_inner_texts()
    assert [" ".join(branch.split()) for branch in branches] == [
        "accepted: )",
        "rejected: ] +",
    ]


@pytest.mark.full
def test_every_guess_of_a_mixed_tree_shows_its_own_source(page: Page, site: Site):
    site.fake.answer = (MIXED,)
    run(page)
    box = page.locator(".step")
    assert box.inner_text().split("\n")[0] == "Suffix, EAGLE-3"
    assert box.get_attribute("aria-label") == ("Step 1, suffix, EAGLE-3: 3 of 5 accepted, 12.4 ms")
    parts = box.locator(".step-bar > *").evaluate_all(
        "all => all.map(each => [each.className, each.style.flexGrow])"
    )
    assert parts == [
        ["origin-suffix accepted", "2"],
        ["origin-eagle3 accepted", "1"],
        ["origin-suffix", "0"],
        ["origin-eagle3", "2"],
    ]
    assert box.locator(".step-bar").evaluate("each => each.offsetHeight") == 4
    box.hover()
    branches = page.locator("#detail .branches li")
    assert [" ".join(each.split()) for each in branches.all_inner_texts()] == [
        "accepted: abd rejected: e",
        "accepted: ab rejected: c",
    ]
    guesses = page.locator("#detail .branches li:first-child :is(ins, del)")
    looks = guesses.evaluate_all(
        """all => all.map((each) => {
          const origin = [...each.classList].find((name) => name.startsWith("origin-"));
          return [each.tagName, origin, getComputedStyle(each).getPropertyValue("--origin")];
        })"""
    )
    assert [look[:2] for look in looks] == [
        ["INS", "origin-suffix"],
        ["INS", "origin-suffix"],
        ["INS", "origin-eagle3"],
        ["DEL", "origin-eagle3"],
    ]
    assert looks[0][2] != looks[2][2]
    assert looks[2][2] == looks[3][2]


@pytest.mark.full
def test_the_legend_explains_what_the_engine_can_draft_and_nothing_else(page: Page, site: Site):
    own = ["Plain", "Bonus", "Recovered"]
    drafts = facts("prediction", "eagle3", "suffix", num_speculative_tokens=4)
    for site.feed.facts in (drafts, facts(num_speculative_tokens=0)):
        page.reload()
        page.wait_for_selector("#link[data-state=open]")
        drafting = ["Prediction", "Suffix", "EAGLE-3"] if site.feed.facts is drafts else []
        expected = [own[0], *drafting, *own[1:]]
        assert page.locator("#meanings dt").all_inner_texts() == expected
        assert page.locator("#legend li").all_text_contents() == expected


@pytest.mark.full
def test_a_lossy_engine_says_so_and_promises_no_distribution(page: Page, site: Site):
    notice = page.locator("#speculation-lossy")
    expect(notice).to_be_hidden()
    site.feed.facts = FACTS | {"lossless": False}
    page.reload()
    expect(notice).to_be_visible()
    expect(notice).to_contain_text("sampled texts do not have")
    site.fake.plain_end = "!"
    page.check("#compare")
    page.fill("#temperature", "0.8")
    run(page)
    expect(page.locator(".verdict")).to_contain_text("their distribution is not the")


@pytest.mark.full
def test_every_step_has_a_box_with_its_source_counts_and_time(page: Page):
    run(page)
    boxes = page.locator(".step")
    labels = boxes.evaluate_all("all => all.map(each => each.getAttribute('aria-label'))")
    assert labels == [
        "Step 1, nothing drafted, 31.2 ms",
        "Step 2, draft model: 2 of 3 accepted, 12.4 ms",
        "Step 3, n-gram: 2 of 2 accepted, 12.4 ms",
        "Step 4, suffix: 4 of 5 accepted, 14.1 ms",
        "Step 5, suffix: 5 of 5 accepted, 13.9 ms",
        "Step 6, prediction: 4 of 5 accepted, 14.5 ms",
        "Step 7, draft model: 1 of 3 accepted, 12.4 ms",
    ]
    assert boxes.nth(3).inner_text().split() == ["Suffix", "4/5", "14.1", "ms"]
    boxes.nth(1).hover()
    assert page.locator(".token.marked").all_text_contents() == [" n", " <", " 2"]


def test_the_figures_and_the_mix_count_what_came(page: Page):
    run(page)
    figures = dict(
        page.locator(".figures > div").evaluate_all(
            "all => all.map(each => [each.dataset.figure, each.querySelector('dd').textContent])"
        )
    )
    num_tokens = sum(len(step.tokens) for step in ANSWER)
    assert figures["tokens"] == str(num_tokens)
    assert figures["accepted"] == "18 of 23"
    assert figures["per-step"] == f"{num_tokens / len(ANSWER):.2f}"
    assert figures["ttft"].endswith("s")
    mix = page.get_attribute(".mix", "aria-label") or ""
    counts = Counter(origin for step in ANSWER for _, origin in step.tokens)
    assert f"Suffix {counts['suffix']}" in mix
    assert f"Recovered {counts['recovered']}" in mix


def test_a_comparison_runs_one_after_the_other_and_says_that_the_texts_are_the_same(
    page: Page, site: Site
):
    site.fake.delay_s = 0.02
    page.check("#compare")
    run(page)
    expect(page.locator(".verdict")).to_contain_text("Identical text, ")
    expect(page.locator(".verdict")).to_contain_text("times as fast")
    assert page.locator(".pane").count() == 2
    assert page.text_content(".pane:last-child .output") == TEXT
    on, off = (body for _, body in site.fake.bodies)
    assert off.pop("speculation") == {"enabled": False, "trace": True}
    assert on.pop("speculation") == {"trace": True}
    assert on.pop("cache_salt") != off.pop("cache_salt")  # both read the whole prompt
    assert on == off


@pytest.mark.full
def test_a_comparison_says_where_texts_differ(page: Page, site: Site):
    site.fake.plain_end = "!"
    page.check("#compare")
    run(page)
    expect(page.locator(".verdict")).to_contain_text(
        f"The texts differ from character {len(TEXT) + 1}"
    )


@pytest.mark.full
def test_sampled_runs_of_a_comparison_share_their_seed(page: Page, site: Site):
    page.check("#compare")
    page.fill("#temperature", "0.8")
    run(page)
    on, off = (body for _, body in site.fake.bodies)
    assert on["temperature"] == 0.8
    assert isinstance(on["seed"], int)
    assert on["seed"] == off["seed"]


def test_the_examples_are_python_that_stops_where_a_line_goes_on(page: Page):
    buttons = page.locator(".example")
    assert buttons.count() >= 3
    for button in buttons.all():
        button.click()
        text = page.input_value("#prompt")
        ast.parse(text + (" f(): pass" if text.endswith("def") else " pass"))
        assert text == text.rstrip()


def test_settings_reach_the_request(page: Page, site: Site):
    page.select_option("#method", "draft_model")
    page.fill("#num-speculative-tokens", "3")
    page.fill("#prediction", "return n")
    page.fill("#max-tokens", "7")
    run(page)
    body = site.fake.bodies[0][1]
    assert body["speculation"] == {
        "trace": True,
        "method": "draft_model",
        "num_speculative_tokens": 3,
    }
    assert body["prediction"] == {"type": "content", "content": "return n"}
    assert body["max_tokens"] == 7
    assert body["temperature"] == 0.8


@pytest.mark.full
def test_speculation_can_be_off_and_its_settings_are_then_out_of_reach(page: Page, site: Site):
    page.fill("#prediction", "return n")
    page.uncheck("#enabled")
    for name in ("compare", "method", "num-speculative-tokens", "prediction"):
        expect(page.locator(f"#{name}")).to_be_disabled()
    run(page)
    body = site.fake.bodies[0][1]
    assert body["speculation"] == {"enabled": False, "trace": True}
    assert "prediction" not in body
    expect(page.locator(".pane h3")).to_have_text("Without speculation")


@pytest.mark.full
def test_settings_are_out_of_reach_on_an_engine_without_speculation(page: Page, site: Site):
    site.feed.facts = facts(num_speculative_tokens=0)
    page.reload()
    expect(page.get_by_text("This engine runs without speculation.")).to_be_visible()
    expect(page.locator("#enabled")).to_be_disabled()
    run(page)
    assert site.fake.bodies[0][1]["speculation"] == {"enabled": False, "trace": True}
    expect(page.locator(".pane h3")).to_have_text("Without speculation")


@pytest.mark.full
def test_a_chat_remembers_what_was_said(page: Page, site: Site):
    page.get_by_label("Chat", exact=True).check()
    run(page, "first")
    page.fill("#prompt", "second")
    page.click("#run")
    expect(page.locator(".turn")).to_have_count(2)
    page.wait_for_selector(".turn:last-child .pane[data-state=stop]")
    assert [route for route, _ in site.fake.bodies] == ["chat/completions"] * 2
    assert site.fake.bodies[1][1]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "second"},
    ]
    page.click("#clear")
    expect(page.locator(".turn")).to_have_count(0)


def test_a_refused_request_says_why_and_the_key_opens_the_door(page: Page, site: Site):
    site.fake.needs_key = True
    page.fill("#prompt", "x")
    page.click("#run")
    expect(page.get_by_role("alert")).to_have_text("Incorrect API key provided")
    assert all("401" in complaint for complaint in site.complaints)  # the browser's own words
    site.complaints.clear()
    page.fill("#api-key", API_KEY)
    run(page)
    stored = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
    assert API_KEY not in stored
    assert API_KEY not in page.content()


@pytest.mark.full
def test_an_error_in_the_middle_keeps_what_came_and_says_why(page: Page, site: Site):
    site.fake.breaks_after = 2
    page.check("#compare")
    page.fill("#prompt", "x")
    page.click("#run")
    expect(page.get_by_role("alert")).to_have_text("the engine died")
    assert page.text_content(OUTPUT) == "if n < 2"
    assert len(site.fake.bodies) == 1  # there is nothing to compare with
    expect(page.locator("#run")).to_be_visible()


@pytest.mark.full
def test_a_run_can_be_stopped(page: Page, site: Site):
    site.fake.delay_s = 0.3
    page.fill("#prompt", "x")
    page.click("#run")
    page.wait_for_selector(".output .token >> nth=5")
    page.click("#stop")
    page.wait_for_selector(".pane[data-state=stopped]")
    expect(page.locator("#run")).to_be_visible()
    assert len(page.text_content(OUTPUT) or "") < len(TEXT)


def test_text_of_the_model_is_never_markup(page: Page, site: Site):
    evil = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    site.fake.answer = (ScriptedStep(((evil, "plain"),), ((evil, "suffix"),), (0,), ()),)
    run(page, evil)
    assert page.text_content(OUTPUT) == evil
    page.hover(f"{OUTPUT} .token")
    expect(page.locator("#detail del")).to_have_text(evil)
    assert page.locator("main img, main script, #detail img").count() == 0
