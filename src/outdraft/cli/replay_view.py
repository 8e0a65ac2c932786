"""What `outdraft replay` shows to people."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from outdraft.cli.command import table_of, wide_console
from outdraft.planning.replay_scores import Recorded, Report, RunScore, Score, SourceScore


def show(report: Report) -> None:
    """The trace, then each configuration."""
    console = wide_console(100)
    recorded = report.recorded
    console.print(_facts(recorded), style="bold")
    pace = "as they came" if report.concurrency is None else f"{report.concurrency} at once"
    console.print(
        f"Replayed {pace}. The prefix cache supplied {recorded.cached_tokens:,} tokens of prompts, "
        f"in the replay {report.replayed_cached_tokens:,}."
    )
    if recorded.sources:
        console.print(_sources("As recorded", recorded.sources))
    for source, chances in recorded.level_chances.items():
        console.print(f"{source}, acceptance by position: {_chances(chances)}")
    for one in report.scores:
        _show_score(console, one)
    if not any(one.runs for one in report.scores):
        console.print("Without --costs or --model nobody knows what steps take.", style="dim")


def _facts(recorded: Recorded) -> str:
    return (
        f"{recorded.num_requests:,} requests in {recorded.span_s:,.1f} s, "
        f"{recorded.num_texts:,} texts ({recorded.num_aborted:,} aborted), "
        f"{recorded.prompt_tokens:,} tokens of prompts, {recorded.output_tokens:,} of outputs"
    )


def _show_score(console: Console, one: Score) -> None:
    if one.sources:
        console.print(_sources(f"{one.method}, at its greatest length", one.sources))
    else:
        console.print(f"{one.method}: no drafts were found")
    if one.runs:
        console.print(_runs(one.method, one.runs))


def _sources(title: str, scores: Sequence[SourceScore]) -> Table:
    numbers = "drafts", "drafted", "accepted", "rate", "acceptance\nlength"
    table = table_of(["source"], numbers, title)
    table.add_column("basis")
    for one in scores:
        table.add_row(
            one.source,
            f"{one.num_drafts:,}",
            f"{one.drafted:,}",
            f"{one.accepted:,}",
            f"{one.acceptance_rate:.2f}",
            f"{one.acceptance_length:.2f}",
            one.basis,
        )
    return table


def _runs(method: str, runs: Sequence[RunScore]) -> Table:
    numbers = "tokens/s", "TPOT ms", "against\nplain", "acceptance\nlength", "drafts\na token"
    table = table_of(["lengths"], numbers, f"{method}, predicted")
    for run in runs:
        table.add_row(
            run.name,
            f"{run.tokens_per_s:,.1f}",
            "-" if run.tpot_ms is None else f"{run.tpot_ms:.3f}",
            f"{run.against_plain:.3f}x",
            f"{run.acceptance_length:.2f}",
            f"{run.drafts_per_token:.2f}",
        )
    return table


def _chances(chances: Sequence[float]) -> str:
    return " ".join(f"{chance:.2f}" for chance in chances)
