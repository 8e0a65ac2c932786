"""Writes tables of results into the documents; no number is edited by hand.

docs/measuring.md has the tables of decode.py, of sweeps and of roofline.py.
"""

import json
from pathlib import Path
from typing import Any

from committed import read
from pages import write
from roofline_table import roofline_table
from sweep_table import sweep_plot, sweep_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CHOSEN = "{}, lengths chosen"  # the name of a method's second variant
# What the embedded target's weights of bfloat16 are computed in.
DTYPES = {"float32": "float32 over bfloat16 weights", "bfloat16": "bfloat16"}
SWEEPS = "![Chosen lengths over the best of plain decoding and fixed lengths](sweeps.svg)"


def main() -> None:
    page = ROOT / "docs" / "measuring.md"
    decoded = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("decode-*.json"))]
    write(page, "measured", "\n".join(map(table, decoded)))
    sweeps = [read(path) for path in sorted(RESULTS.glob("sweep-*.json"))]
    write(page, "sweeps", f"{sweep_table(sweeps)}\n\n{SWEEPS}\n")
    sweep_plot(sweeps, page.parent / "sweeps.svg")
    rooflines = [read(path) for path in sorted(RESULTS.glob("roofline-*.json"))]
    write(page, "roofline", f"{roofline_table(rooflines)}\n")


def table(result: dict[str, Any]) -> str:
    """Markdown of one result of decode.py."""
    where, options, summary = result["environment"], result["options"], result["summary"]
    floor_ms = 1e3 * result["weight_bytes"] / (result["read_bandwidth_gb_per_s"] * 1e9)
    share = floor_ms / summary["plain"]["tpot_ms_median"]
    lines = [
        f"{where['processor']}, {where['cores']} cores; {DTYPES[options['dtype']]}, temperature "
        f"{float(options['temperature']):g}, {options['prompts']} held-out prompts of "
        f"{options['max_tokens']} tokens, batch 1; commit {where['commit'][:9]}. Plain decoding "
        f"runs at {share:.0%} of what reading {result['weight_bytes'] / 1e6:.0f} MB of weights at "
        f"{result['read_bandwidth_gb_per_s']:.1f} GB/s would allow. "
        f"{summary['plain']['repeated_share']:.0%} of the places in the texts begin eight tokens "
        "that stand earlier in the same text.",
        "",
        "| | ms a token (median) | against plain | lengths chosen, against plain | "
        "acceptance length | acceptance rate | draft / verify / sample / host, us a step |",
        "|---|---|---|---|---|---|---|",
    ]
    names = [name for name in summary if CHOSEN.format("") not in name]
    for name, row in ((name, summary[name]) for name in names):
        chosen = summary.get(CHOSEN.format(name))
        cells = [name, f"{row['tpot_ms_median']:.2f}", f"{row['speedup_over_plain']:.2f}"]
        cells.append(f"{chosen['speedup_over_plain']:.2f}" if chosen else "")
        drafts = "acceptance_length" in row and name != "plain"
        cells.append(f"{row['acceptance_length']:.2f}" if drafts else "")
        cells.append(f"{row['acceptance_rate']:.2f}" if drafts else "")
        split = row.get("us_per_step")
        cells.append(" / ".join(f"{us:.0f}" for us in split.values()) if split else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", ""])


if __name__ == "__main__":
    main()
