"""GET /metrics: names, labels and types are promises; the dashboard asks for nothing else."""

import json
import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from outdraft.server.metrics import metrics_router
from tests.server.metrics.scripted import Exposed, metrics, report, step

DASHBOARD = Path(__file__).parents[3] / "dashboards" / "grafana.json"

# Name without the prefix: type, labels beside model_name (and le).
GOLDEN = {
    "num_requests_running": ("gauge", ()),
    "num_requests_waiting": ("gauge", ()),
    "kv_cache_usage_perc": ("gauge", ()),
    "prompt_tokens": ("counter", ()),
    "generation_tokens": ("counter", ()),
    "prefix_cache_queries": ("counter", ()),
    "prefix_cache_hits": ("counter", ()),
    "num_preemptions": ("counter", ()),
    "request_success": ("counter", ("finished_reason",)),
    "time_to_first_token_seconds": ("histogram", ()),
    "inter_token_latency_seconds": ("histogram", ()),
    "request_time_per_output_token_seconds": ("histogram", ()),
    "e2e_request_latency_seconds": ("histogram", ()),
    "request_queue_time_seconds": ("histogram", ()),
    "request_prompt_tokens": ("histogram", ()),
    "request_generation_tokens": ("histogram", ()),
    "spec_decode_num_drafts": ("counter", ()),
    "spec_decode_num_draft_tokens": ("counter", ()),
    "spec_decode_num_accepted_tokens": ("counter", ()),
    "spec_decode_num_accepted_tokens_per_pos": ("counter", ("position",)),
    "spec_decode_draft_tokens_by_source": ("counter", ("source",)),
    "spec_decode_accepted_tokens_by_source": ("counter", ("source",)),
    "spec_decode_drafts_by_source": ("counter", ("source",)),
    "chosen_draft_length": ("histogram", ()),
    "granted_draft_length": ("histogram", ()),
    "spec_decode_is_drafting": ("gauge", ()),
    "spec_decode_price": ("gauge", ()),
    "spec_decode_predicted_gain": ("gauge", ()),
    "spec_decode_steps": ("counter", ("reason",)),
    "spec_decode_drafts_per_pos": ("counter", ("position", "source")),
    "spec_decode_accepted_drafts_per_pos": ("counter", ("position", "source")),
    "spec_decode_alarms": ("counter", ("alarm", "source")),
    "spec_decode_alarm_active": ("gauge", ("alarm", "source")),
    "predicted_step_seconds": ("counter", ("part",)),
    "measured_step_seconds": ("counter", ("part",)),
    "step_seconds": ("counter", ("phase",)),
    "estimated_tokens_per_second_without_speculation": ("gauge", ()),
}


def served(accept: str | None = None):
    app = FastAPI()
    counted = metrics()
    counted.observe_steps(report(step((2, 0), (1, 0)), running=2))
    app.include_router(metrics_router(counted.registry))
    return TestClient(app).get("/metrics", headers={"accept": accept} if accept else None)


def exposed_labels() -> dict[str, set[str]]:
    """Labels by sample name, of a server that has done nothing yet."""
    labels: dict[str, set[str]] = {}
    for sample in Exposed(metrics()).samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_names_types_and_labels_are_the_golden_list():
    families = [
        family
        for family in text_string_to_metric_families(served().text)
        if not family.name.endswith("_created")
    ]
    found = {
        family.name.removeprefix("outdraft:"): (
            family.type,
            tuple(
                sorted(
                    {label for sample in family.samples for label in sample.labels}
                    - {"model_name", "le"}
                )
            ),
        )
        for family in families
    }
    assert found == GOLDEN
    assert all(family.name.startswith("outdraft:") for family in families)
    assert all(family.documentation for family in families)
    assert all(s.labels["model_name"] == "served" for f in families for s in f.samples)


def test_label_values_are_there_before_anything_happened():
    values: dict[str, set[str]] = {}
    for sample in Exposed(metrics()).samples:
        for label, value in sample.labels.items():
            values.setdefault(label, set()).add(value)
    assert values["finished_reason"] == {"stop", "length", "abort", "error"}
    assert values["phase"] == {"draft", "verify", "sample", "host"}
    assert values["source"] == {"prediction", "suffix", "draft_model"}  # this engine's
    assert values["position"] == {"0", "1", "2"}


def test_the_format_is_text_whatever_the_scraper_would_accept():
    for accept in (None, "application/openmetrics-text; version=1.0.0, text/plain;q=0.5"):
        answer = served(accept)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert 'outdraft:num_requests_running{model_name="served"} 2.0\n' in answer.text


def dashboard_queries() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    variables = [
        one["definition"] for one in dashboard["templating"]["list"] if "definition" in one
    ]
    return queries + variables


def test_the_dashboard_asks_for_metrics_and_labels_that_exist():
    labels = exposed_labels()
    for query in dashboard_queries():
        names = re.findall(r"outdraft:\w+", query)
        assert names
        assert set(names) <= set(labels), query
        grouped = re.findall(r"\b(?:by|ignoring) \(([^)]*)\)", query)
        selected = re.findall(r"[{,]\s*(\w+)=~?", query)
        known = set().union(*(labels[name] for name in names))
        assert {*",".join(grouped).replace(" ", "").split(",")} - {""} <= known, query
        assert set(selected) <= known, query


def test_the_dashboard_shows_every_metric():
    asked = set(re.findall(r"outdraft:\w+", " ".join(dashboard_queries())))
    base = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked}
    assert base == {f"outdraft:{name}" for name in GOLDEN}


@pytest.mark.parametrize("row", ["Traffic", "Latency", "Speculation", "Engine"])
def test_the_dashboard_has_its_rows(row):
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert [p["title"] for p in panels if p["type"] == "row"].count(row) == 1


def test_no_two_panels_share_an_id_or_a_place():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
