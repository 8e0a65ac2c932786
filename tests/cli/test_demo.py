"""The demo tells every source apart, and explains the ones that its engine has."""

import io

import pytest
from rich.console import Console

from outdraft import LLM
from outdraft.cli.demo import SOURCES, DemoView
from outdraft.core.draft import DraftSource
from tests.cli.pair import pair


def test_every_source_has_a_label_and_a_style_of_its_own():
    assert set(SOURCES) == {str(source) for source in DraftSource}
    for different in zip(*SOURCES.values(), strict=True):
        assert len(set(different)) == len(DraftSource)


@pytest.mark.parametrize(
    ("method", "legend"),
    [("suffix", "suffix."), ("combined", "suffix, n-gram, draft model.")],
)
def test_the_legend_names_what_the_engine_has(method, legend):
    speculation = {"method": method}
    if method == "combined":
        speculation["model"] = str(pair().drafter)
    llm = LLM(
        str(pair().target),
        dtype="float32",
        device="cpu",
        num_blocks=64,
        speculative_config=speculation,
    )
    written = io.StringIO()
    DemoView(Console(file=written, width=200), llm, ()).header()
    assert written.getvalue().rstrip().endswith(f"Accepted drafts: {legend}")
