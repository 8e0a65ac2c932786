"""Results for people and for files: a table, JSON, the plots of a sweep, and where they ran."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outdraft.core.errors import ConfigError
from outdraft.loading.machine import installed_version, processor

WIDTH = 60  # of tables, in letters
PLOT_SIZE = (72, 14)  # in the terminal, in letters
PACKAGES = ("outdraft", "torch", "tokenizers", "transformers", "httpx")
GIT_TIMEOUT_S = 10

_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "client_queue_time": "Client-side Queueing",
}
_COUNTS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "max_concurrency": "Maximum request concurrency",
    "request_rate": "Request rate configured (RPS)",
    "duration": "Benchmark duration (s)",
    "elapsed_time": "Benchmark duration (s)",
    "num_requests": "Finished requests",
    "batch_size": "Batch size",
    "num_iters": "Iterations",
    "avg_latency": "Avg latency (s)",
    "std_latency": "Std latency (s)",
    "total_input_tokens": "Total input tokens",
    "total_output_tokens": "Total generated tokens",
    "request_throughput": "Request throughput (req/s)",
    "requests_per_second": "Request throughput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "total_token_throughput": "Total token throughput (tok/s)",
    "tokens_per_second": "Total token throughput (tok/s)",
    "max_concurrent_requests": "Peak concurrent requests",
    "tokens_per_chunk": "Tokens per chunk",
}
_ACCEPTANCE = {
    "spec_decode_acceptance_rate": "Acceptance rate (%)",
    "spec_decode_acceptance_length": "Acceptance length",
    "spec_decode_num_drafts": "Drafts",
    "spec_decode_draft_tokens": "Draft tokens",
    "spec_decode_accepted_tokens": "Accepted tokens",
}
_SWEEP_COLUMNS = (
    ("max_concurrency", "concurrency"),
    ("output_throughput", "tok/s"),
    ("median_ttft_ms", "TTFT ms"),
    ("median_tpot_ms", "TPOT ms"),
    ("median_e2el_ms", "E2EL ms"),
    ("spec_decode_acceptance_length", "acceptance"),
    ("failed", "failed"),
)
_PANELS = (
    ("output_throughput", "output tokens/s"),
    ("median_tpot_ms", "median time per output token, ms"),
    ("median_ttft_ms", "median time to first token, ms"),
)


def as_table(title: str, result: dict[str, Any]) -> str:
    """A result for the terminal, in vLLM's order; what a result does not have is left out."""
    lines = [f" {title} ".center(WIDTH, "="), *_rows(result, _COUNTS)]
    percentiles = result.get("percentiles", {})
    lines += [_row(f"P{share} latency (s)", value) for share, value in percentiles.items()]
    for name, heading in _TITLES.items():
        short, end = name.upper() if len(name) < 5 else "queue time", f"_{name}_ms"
        words = [key.removesuffix(end) for key in result if key.endswith(end)]
        lines += [f" {heading} ".center(WIDTH, "-")] if words else []
        lines += [_row(f"{word.capitalize()} {short} (ms)", result[word + end]) for word in words]
    if "phase_seconds" in result:
        lines.append(" Seconds by phase ".center(WIDTH, "-"))
        lines += [_row(f"  {phase}", value) for phase, value in result["phase_seconds"].items()]
    if "spec_decode_num_drafts" in result:
        lines.append(" Speculative Decoding ".center(WIDTH, "-"))
        lines += _rows(result, _ACCEPTANCE)
        lines.append("Per-position acceptance (%):")
        rates = result["spec_decode_per_position_acceptance_rates"]
        lines += [_row(f"  Position {at}", 100 * rate) for at, rate in enumerate(rates)]
    if result.get("failures"):
        lines.append(" Failures ".center(WIDTH, "-"))
        lines += [f"{count} x {error}" for error, count in result["failures"].items()]
    lines.append("=" * WIDTH)
    return "\n".join([*lines, *(f"note: {note}" for note in result["notes"])])


def sweep_table(results: Sequence[dict[str, Any]]) -> str:
    """One line per concurrency."""
    lines = ["".join(f"{heading:>12}" for _, heading in _SWEEP_COLUMNS)]
    for result in results:
        cells = [_number(result.get(name)) for name, _ in _SWEEP_COLUMNS]
        lines.append("".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def strict_json(result: dict[str, Any]) -> str:
    """A number that is none is an error, not NaN."""
    return json.dumps(result, indent=2, allow_nan=False)


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write strict JSON into a file, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(strict_json(result) + "\n", encoding="utf-8")


def environment() -> dict[str, Any]:
    """Commit and whether the tree differs from it, None outside of a checkout; host and versions.

    All of it is about the machine that measures: a server may run elsewhere.
    """
    status = _git("status", "--porcelain")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "is_dirty": None if status is None else bool(status),
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in PACKAGES},
    }


def compute() -> dict[str, Any]:
    """Processor, card and threads of this process: for results about an engine in it."""
    import torch

    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
    }


def check_installed(*packages: str) -> None:
    """Raise ConfigError that names the extra, if one of them is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ConfigError(f"this needs {', '.join(missing)}: pip install 'outdraft[bench]'")


def sweep_picture(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG: throughput and latencies over concurrency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(_PANELS), 3.6), layout="constrained")
    for place, (name, heading) in enumerate(_PANELS, start=1):
        axes = figure.add_subplot(1, len(_PANELS), place)
        xs, ys = _curve(results, name)
        axes.plot(xs, ys, marker="o")
        by_concurrency(axes, xs, heading)
        axes.set_ylim(bottom=0)
    save_figure(figure, path)


def by_concurrency(axes: Any, xs: Sequence[int], title: str, more: str = "") -> None:
    """Give a plot over concurrent requests its axis, title and grid. `more`: after the label."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(xs, labels=[str(x) for x in xs])
    axes.set_xlabel(f"concurrent requests{more}")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def sweep_plot(results: Sequence[dict[str, Any]]) -> str:
    """Throughput over concurrency in letters."""
    import plotext

    name, heading = _PANELS[0]
    xs, ys = _curve(results, name)
    if not xs:
        return ""
    figure = plotext.figure
    figure.clear()
    figure.plot_size(*PLOT_SIZE)
    figure.title(f"{heading} over concurrent requests")
    figure.draw(figure.signal(xs, ys).lines())
    figure.ruler("x").ticks(xs)
    text = plotext.uncolorize(str(figure.build()))
    figure.clear()
    return str(text)


def _curve(results: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """A metric over concurrency, where there is one."""
    known = [result for result in results if result.get(name) is not None]
    return [one["max_concurrency"] for one in known], [one[name] for one in known]


def _rows(result: dict[str, Any], labels: dict[str, str]) -> list[str]:
    return [
        _row(label, result[name]) for name, label in labels.items() if result.get(name) is not None
    ]


def _row(label: str, value: object) -> str:
    return f"{label + ':':<44}{_number(value):>{WIDTH - 44}}"


def _number(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _git(*arguments: str) -> str | None:
    """Output of git in the package's folder, if it is tracked there; else None.

    An installed package may lie in a checkout of something else, in which git ignores it.
    """
    folder = Path(__file__).parent
    for command in (("ls-files", "--error-unmatch", "../__init__.py"), arguments):
        try:
            done = subprocess.run(
                ["git", *command], cwd=folder, capture_output=True, text=True, timeout=GIT_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode != 0:
            return None
    return done.stdout.strip()
