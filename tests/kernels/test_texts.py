"""Drafts from texts: each library drafts what the reference does, however texts come and go."""

from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from outdraft.core.draft import MAX_DRAFTS, DraftAsk
from tests.kernels.comparisons import Case

RULES = st.tuples(
    st.integers(2, 9),
    st.sampled_from([0.0, 0.5, 1.0, 1.7, 1e9]),
    st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    st.integers(1, 4),
)


@st.composite
def pieces(draw: st.DrawFn) -> list[int]:
    """Some tokens of few kinds, with runs of one kind."""
    runs = st.tuples(st.integers(0, 3), st.sampled_from([1, 1, 1, 2, 5, 30]))
    return [token for token, length in draw(st.lists(runs, max_size=6)) for _ in range(length)]


def grow_texts(case: Case) -> Iterator[tuple[dict[str, list[int]], str | None]]:
    """The live texts of each step, and one that ends behind it; None: none."""
    data, live = case.data, dict[str, list[int]]()
    for _ in range(data.draw(st.integers(1, 8), "steps")):
        name = data.draw(st.sampled_from("abc"), "request")
        kind = data.draw(st.sampled_from(["grows", "grows", "is cut", "is another", "forks"]), "it")
        text = old = live.get(name, [])
        if kind == "is cut":
            text = text[: data.draw(st.integers(0, len(text)), "length")]
        elif kind == "is another":
            text = []
        elif kind == "forks" and live:
            text = live[data.draw(st.sampled_from(sorted(live)), "from")]
        text = text + data.draw(pieces(), "tokens")
        if old and text[len(old) - 1 :][:1] == old[-1:] and text[: len(old)] != old:
            text = text[: len(old) - 1]  # it would pass for a continuation
        live[name] = text
        yield live, (name if data.draw(st.booleans(), "ends") else None)


def asks_of(case: Case, live: dict[str, list[int]]) -> list[DraftAsk]:
    sizes = st.sampled_from([1, 2, 5, 8, MAX_DRAFTS, 1000])
    return [
        DraftAsk(name, np.array(text, np.int32), case.data.draw(sizes, "most drafts"))
        for name, text in live.items()
    ]


def compare_ngram_texts(case: Case) -> None:
    min_n, more_n = case.data.draw(st.tuples(st.integers(1, 3), st.integers(0, 3)), "n")
    branching = case.data.draw(st.sampled_from([1, 2, 5, MAX_DRAFTS]), "branching")
    rule = min_n, min_n + more_n, branching
    ours, want = case.kernels.ngram_texts(*rule), case.reference.ngram_texts(*rule)
    for live, ended in grow_texts(case):
        asks = asks_of(case, live)
        assert ours.draft(asks) == want.draft(asks)
        if ended is not None:
            live.pop(ended)
            ours.forget(ended)
            want.forget(ended)


def compare_suffix_texts(case: Case) -> None:
    rule = case.data.draw(RULES, "rule")
    both = case.kernels.suffix_texts(*rule), case.reference.suffix_texts(*rule)
    sizes = st.sampled_from([1, 3, 10, 1000])
    kept: list[int] = []  # tokens of each finished text that are not taken back
    num_coming = 0  # tokens of the newest one that are not counted
    for live, ended in grow_texts(case):
        asks = asks_of(case, live)
        drafts, wanted = (one.draft(asks) for one in both)
        assert drafts == wanted
        if num_coming:
            size = case.data.draw(sizes, "count")
            counted, other = (one.count_finished(size) for one in both)
            assert counted == other == min(size, num_coming)
            num_coming -= counted
        elif kept and case.data.draw(st.booleans(), "takes back"):
            size = case.data.draw(sizes, "remove")
            removed, other = (one.remove_finished(size) for one in both)
            assert removed == other == min(size, kept[0])
            kept = [kept[0] - removed, *kept[1:]] if removed < kept[0] else kept[1:]
        if ended is not None:
            text = np.array(live.pop(ended), np.int32)
            for one in both:
                one.forget(ended)
                if num_coming == 0 and len(text):
                    one.add_finished(text)
            if num_coming == 0 and len(text):
                kept.append(len(text))
                num_coming = len(text)


COMPARISONS = {"ngram_texts": compare_ngram_texts, "suffix_texts": compare_suffix_texts}
