"""The page's pure functions, called in the browser."""

import json
import random
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.dashboard.conftest import Site

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dashboard")]  # one browser at a time


@pytest.fixture(scope="module", name="page")
def _page(server: Site, browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    page.goto(server.url)
    yield page
    page.close()


def call(page: Page, module: str, expression: str) -> object:
    return page.evaluate(f"import('/dashboard/{module}').then(async (m) => ({expression}))")


def test_a_chunk_without_a_trace_is_a_token_of_unknown_origin(page: Page):
    decoded = call(page, "chunk.js", "m.decodeChunk({choices: [{index: 0, text: 'hi'}]})")
    assert decoded == {
        "text": "hi",
        "tokens": [{"text": "hi", "origin": None}],
        "steps": [],
        "finishReason": None,
        "usage": None,
        "error": None,
    }


def test_a_chat_chunk_and_a_completion_chunk_decode_to_the_same(page: Page):
    rest = "index: 0, finish_reason: 'stop', outdraft: {tokens: [{text: 'a', origin: 'ngram'}]}"
    chat = f"m.decodeChunk({{choices: [{{delta: {{content: 'a'}}, {rest}}}]}})"
    completion = f"m.decodeChunk({{choices: [{{text: 'a', {rest}}}]}})"
    assert call(page, "chunk.js", chat) == call(page, "chunk.js", completion)


def test_usage_and_errors_come_without_choices(page: Page):
    usage = call(page, "chunk.js", "m.decodeChunk({choices: [], usage: {completion_tokens: 3}})")
    assert usage == {
        "text": "",
        "tokens": [],
        "steps": [],
        "finishReason": None,
        "usage": {"completion_tokens": 3},
        "error": None,
    }
    error = call(page, "chunk.js", "m.decodeChunk({error: {message: 'the engine died'}}).error")
    assert error == "the engine died"


@pytest.mark.parametrize("end", ["\\n", "\\r\\n"])
def test_events_are_the_same_however_the_stream_is_cut(page: Page, end: str):
    stream = f': hello{end}{end}event: facts{end}data: {{"a":1}}{end}{end}data: né→{end}{end}'
    read = f"""(async (size) => {{
      const bytes = new TextEncoder().encode(`{stream}`);
      const body = new ReadableStream({{
        start(out) {{
          for (let i = 0; i < bytes.length; i += size) out.enqueue(bytes.slice(i, i + size));
          out.close();
        }},
      }});
      const events = [];
      for await (const event of m.readEvents(new Response(body))) events.push(event);
      return events;
    }})"""
    for size in (1, 2, 3, 7, 1000):
        assert call(page, "sse.js", f"await {read}({size})") == [
            {"event": "facts", "data": '{"a":1}'},
            {"event": "message", "data": "né→"},
        ]


def test_branches_of_a_tree_share_their_beginning(page: Page):
    drafted = [{"text": text, "source": "medusa"} for text in "abcd"]
    step = f"{{drafted: {drafted}, parents: [0, 1, 1, 3], accepted: new Set([1, 3])}}"
    paths = call(page, "draft.js", f"m.branches({step})")
    assert isinstance(paths, list)
    assert [[token["text"] for token in path] for path in paths] == [["a", "c", "d"], ["a", "b"]]
    assert [[token["accepted"] for token in path] for path in paths] == [
        [True, True, False],
        [True, False],
    ]


def test_branches_of_any_tree_are_its_paths_from_the_root_to_the_leaves(page: Page):
    rng = random.Random(4)
    trees = [[rng.randint(0, row) for row in range(rng.randint(1, 12))] for _ in range(30)]
    for parents in trees:
        drafted = [{"text": str(row), "source": "eagle"} for row in range(1, len(parents) + 1)]
        raw = {"drafted": drafted, "parents": parents, "accepted_rows": [], "num_emitted": 1}
        chunk = json.dumps({"choices": [{"text": "", "outdraft": {"steps": [raw]}}]})
        decode = f"(await import('/dashboard/chunk.js')).decodeChunk({chunk})"
        found = call(page, "draft.js", f"m.branches({decode}.steps[0])")
        assert isinstance(found, list)
        paths = {tuple(int(token["text"]) for token in path) for path in found}
        assert paths == {
            _path(parents, row) for row in range(1, len(parents) + 1) if row not in parents
        }
        assert len(found) == len(paths)


def _path(parents: list[int], row: int) -> tuple[int, ...]:
    return (*_path(parents, parents[row - 1]), row) if row else ()


def aligned(page: Page, *pushes: tuple[str, list[str]]) -> list[list[str]]:
    """Texts of the tokens that each push settles, then those of the end."""
    script = f"""(() => {{
      const aligner = new m.Aligner();
      const texts = (tokens) => tokens.map((token) => token.text);
      const settled = {json.dumps(pushes)}.map(([text, tokens]) =>
        texts(aligner.push(text, tokens.map((each) => ({{ text: each, origin: "plain" }})))));
      return [...settled, texts(aligner.finish())];
    }})()"""
    result = call(page, "align.js", script)
    assert isinstance(result, list)
    return result


def test_a_token_gets_the_space_that_it_lost_when_it_was_decoded_alone(page: Page):
    assert aligned(page, ("the cat", ["the", "cat"]), (" sat", ["sat"])) == [
        ["the", " cat"],
        [" sat"],
        [],
    ]


def test_halves_of_a_character_become_one_token_that_has_it(page: Page):
    half = "\ufffd"
    assert aligned(page, ("", [half, half]), ("→ x", [" x"])) == [[], ["", "→", " x"], []]
    assert aligned(page, ("a", ["a", half]), ("", [half]), ("→", [])) == [["a"], [], [], ["", "→"]]


def test_text_that_was_held_back_reaches_its_tokens(page: Page):
    assert aligned(page, ("", ["a", "b"]), ("ab", []), ("c", ["c"])) == [[], ["a", "b"], ["c"], []]


def test_tokens_never_wait_for_long_nor_is_any_text_lost(page: Page):
    half = "\ufffd"
    settled = aligned(page, ("→→→", [half] * 9), ("→", [half, "</s>"]))
    assert settled == [[""] * 8 + ["→→→"], [], ["", "→"]]


def test_a_token_without_a_part_of_the_answer_shows_itself_at_the_end(page: Page):
    assert aligned(page, ("a", ["a", "</s>"])) == [["a"], ["</s>"]]


def test_a_scale_ends_at_a_round_number_above_its_values(page: Page):
    tops = {0: 1, 0.7: 0.8, 1: 1, 8: 8, 8.1: 10, 11: 15, 101: 150}
    for value, top in tops.items():
        assert call(page, "chart.js", f"m.niceTop({value})") == pytest.approx(top)
