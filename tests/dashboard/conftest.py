"""A real browser on the page, served on loopback beside a scripted API."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI
from msgspec import structs
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from outdraft.core.decision import Decision, Reason
from outdraft.core.draft import DraftSource
from outdraft.core.plan import PhaseTimes
from outdraft.dashboard.feed import LiveFeed
from outdraft.dashboard.router import dashboard_router
from tests.dashboard.fake_openai import FakeOpenAi
from tests.dashboard.steps import facts, stats

CHROMIUM = Path("/usr/bin/chromium")
ARGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
FACTS = facts("prediction", "suffix", "draft_model", num_speculative_tokens=15)


@dataclass
class Site:
    """The server under test. `complaints` are what the browser wrote to its console, `hosts` the
    ones it asked for anything."""

    url: str
    feed: LiveFeed
    fake: FakeOpenAi
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def reset(self) -> None:
        fresh = FakeOpenAi()
        for each in fields(FakeOpenAi):
            setattr(self.fake, each.name, getattr(fresh, each.name))
        self.feed.facts = FACTS
        self.complaints.clear()
        self.hosts.clear()


@pytest.fixture(scope="module", name="server")
def _server() -> Iterator[Site]:
    listener = socket.create_server(("127.0.0.1", 0))
    feed, fake = _feed_with_history(), FakeOpenAi()
    app = FastAPI()
    app.include_router(dashboard_router(feed))
    app.include_router(fake.router())
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield Site(f"http://127.0.0.1:{listener.getsockname()[1]}/", feed, fake)
    feed.close()
    server.should_exit = True
    thread.join(timeout=10)
    assert not thread.is_alive()


@pytest.fixture(scope="module", name="browser")
def _browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(f"no browser: {CHROMIUM} is missing")
    expect.set_options(timeout=30_000)  # as long as Playwright waits elsewhere: machines stall
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def site(server: Site) -> Site:
    server.reset()
    return server


@pytest.fixture
def page(site: Site, browser: Browser) -> Iterator[Page]:
    """The page, open. Afterwards nothing may have been asked of another host, or complained of."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page.on("console", lambda message: site.complaints.append(message.text))
    page.on("pageerror", lambda error: site.complaints.append(str(error)))
    page.on("request", lambda request: site.hosts.add(_host(request)))
    page.goto(site.url)
    page.wait_for_selector("#link[data-state=open]")
    yield page
    page.close()
    assert site.complaints == []
    assert site.hosts == {site.url}


def _host(request: Request) -> str:
    return "/".join(request.url.split("/")[:3]) + "/"


def _feed_with_history() -> LiveFeed:
    """Two seconds have passed: one with drafts, one idle."""
    times = iter([100.0] + [100.5] * 25)  # of the constructor and of what is told below
    feed = LiveFeed(FACTS, clock=lambda: next(times, 102.0))
    step = stats(
        emitted=40,
        drafts=10,
        drafted={DraftSource.SUFFIX: 50, DraftSource.MODEL: 10},
        accepted={DraftSource.SUFFIX: 20, DraftSource.MODEL: 10},
        begun={DraftSource.SUFFIX: 8, DraftSource.MODEL: 2},
        times=PhaseTimes(0.1, 0.6, 0.1),
        host_s=0.2,
    )
    step = structs.replace(
        step,
        granted_lengths=(8, 8, 0),
        draft_levels=((DraftSource.SUFFIX, 4, 2), (DraftSource.SUFFIX, 4, 0)),
        decision=Decision(Reason.GAIN, (), 0.25, 0.1, 0.6, 0.1, 0.5, 40.0, 0.5),
    )
    held = structs.replace(stats(emitted=0), decision=Decision(Reason.NO_GAIN))
    feed.record([step, held], 3, 2, 0.25)
    for ttft_s in (0.02, 0.03, 0.2):
        feed.latency(ttft_s, True)
    for gap_s in [0.01] * 19 + [0.05]:
        feed.latency(gap_s, False)
    feed.without_speculation(16.0)
    return feed
