"""The page's routes: every file with its type, nothing but the files, nothing from elsewhere."""

import asyncio
import json
import re

import httpx
import pytest
from fastapi import FastAPI

from outdraft.core.draft import DraftSource
from outdraft.dashboard.feed import LiveFeed
from outdraft.dashboard.router import dashboard_router
from tests.dashboard.colours import STATIC
from tests.dashboard.steps import facts, stats

FACTS = facts("suffix", num_speculative_tokens=8)
FILES = sorted(entry.name for entry in STATIC.iterdir())


def application(feed: LiveFeed | None = None) -> FastAPI:
    app = FastAPI()
    app.include_router(dashboard_router(feed or LiveFeed(FACTS)))
    return app


def get(path: str, app: FastAPI | None = None) -> httpx.Response:
    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(app or application())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path)

    return asyncio.run(request())


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_as_what_it_is(name):
    types = {
        "css": "text/css; charset=utf-8",
        "html": "text/html; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "svg": "image/svg+xml",
    }
    response = get(f"/dashboard/{name}")
    assert response.status_code == 200
    assert response.headers["content-type"] == types[name.rpartition(".")[2]]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.content == (STATIC / name).read_bytes()


def test_the_root_is_the_page():
    response = get("/")
    assert response.status_code == 200
    assert response.text == (STATIC / "index.html").read_text()


@pytest.mark.parametrize("path", ["/", "/dashboard/main.js"])
def test_nothing_may_be_loaded_from_elsewhere_or_run_inline(path):
    policy = get(path).headers["content-security-policy"]
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert set(directives.values()) == {"'none'", "'self'"}


def test_the_page_has_no_inline_code_and_no_foreign_address():
    page = (STATIC / "index.html").read_text()
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", page))
    assert not re.search(r"<style|\sstyle=|\son\w+=", page)
    for name in FILES:
        text = (STATIC / name).read_text().replace("http://www.w3.org/2000/svg", "")  # a name
        assert "//" not in re.sub(r"(?m)^\s*//.*|\s// .*$", "", text), name


@pytest.mark.parametrize("name", FILES)
def test_every_file_that_a_file_names_exists(name):
    text = (STATIC / name).read_text()
    named = re.findall(r'from "\./([^"]+)"|(?:src|href)="dashboard/([^"]+)"', text)
    assert {script or asset for script, asset in named} <= set(FILES)


@pytest.mark.parametrize(
    "path",
    [
        "/dashboard/../router.py",
        "/dashboard/%2e%2e/router.py",
        "/dashboard/..%2frouter.py",
        "/dashboard/..%2f..%2f..%2fpyproject.toml",
        "/dashboard/%2fetc%2fpasswd",
        "/dashboard/....//router.py",
        "/dashboard/..\\router.py",
        "/dashboard/router.py",
        "/dashboard/static/main.js",
        "/dashboard/main.js%00.css",
    ],
)
def test_nothing_but_the_page_s_files_can_be_read(path):
    response = get(path)
    assert response.status_code == 404
    assert "def " not in response.text


def test_the_page_is_no_part_of_the_api_s_description():
    assert application().openapi()["paths"] == {}


def test_the_events_are_the_facts_and_the_history():
    now = [10.0]
    feed = LiveFeed(
        FACTS,
        clock=lambda: now[0],
    )
    step = stats(
        emitted=3,
        drafts=1,
        drafted={DraftSource.SUFFIX: 4},
        accepted={DraftSource.SUFFIX: 2},
        begun={DraftSource.SUFFIX: 1},
    )
    feed.record([step], 2, 1, 0.25)
    now[0] = 11.0

    async def read() -> httpx.Response:
        transport = httpx.ASGITransport(application(feed))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asyncio.get_running_loop().call_later(0.05, feed.close)  # else it goes on for good
            return await client.get("/dashboard/events")

    response = asyncio.run(read())
    events = [block.split("\n") for block in response.text.strip().split("\n\n")]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert [event for event, _ in events] == ["event: facts", "event: seconds"]
    facts, seconds = (json.loads(data.removeprefix("data: ")) for _, data in events)
    assert facts["model"] == "tiny"
    assert facts["speculation_methods"] == ["suffix"]
    assert facts["num_speculative_tokens"] == 8
    assert facts["lossless"] is True
    (second,) = seconds
    assert second["tokens_per_s"] == 3
    assert second["acceptance_length"] == 3.0
    assert second["mean_draft_length"] == 4.0
    assert second["accepted"] == {"suffix": 2}
    assert second["acceptance_length_by_source"] == {"suffix": 3.0}
    assert (second["running"], second["waiting"], second["kv_usage"]) == (2, 1, 0.25)
