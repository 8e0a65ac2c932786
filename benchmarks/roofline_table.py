"""The document's table of roofline.py's results: a column for each machine."""

from committed import Result, by_setting, machine
from shares import Share, shares

THREADS = 2  # of the results in the table


def roofline_table(results: list[Result]) -> str:
    """Markdown of the newest result of each library and dtype."""
    chosen = [one for one in results if one.content["threads"] == THREADS]
    newest = [
        group[0]
        for group in by_setting(
            chosen, lambda one: (machine(one), one["library"], one["dtype"], one["quantization"])
        )
    ]
    columns = [{share.name: share for share in shares(one.content)} for one in newest]
    lines = [
        "| | " + " | ".join(_title(one) for one in newest) + " |",
        "|---" * (len(newest) + 1) + "|",
    ]
    for name in dict.fromkeys(name for column in columns for name in column):
        cells = [_cell(column[name]) if name in column else "" for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    about = [_about(one, column) for one, column in zip(newest, columns, strict=True)]
    return "\n".join([*lines, "", *about])


def _title(result: Result) -> str:
    content = result.content
    name = f"{machine(content)}, {content['dtype']}, {content['library']}"
    return name if content["quantization"] is None else f"{name}, {content['quantization']}"


def _cell(share: Share) -> str:
    numbers = f"{share.number(share.best)} ({share.number(share.median)})"
    if share.bar is None:
        return numbers
    verdict = share.verdict if share.is_met else f"**{share.verdict}**"
    return f"{numbers}; {share.wanted}, {verdict}"


def _about(result: Result, column: dict[str, Share]) -> str:
    """What it is of, what the machine could do, and how many bars are met."""
    barred = [share for share in column.values() if share.bar is not None]
    read = sorted(speed / 1e9 for speed in result.content["bandwidths"])
    peak = max(result.content["peaks"]) / 1e9
    return (
        f"- `{result.name}`: {result.commit}. {len(read)} turns; memory was read at {read[0]:.1f} "
        f"to {read[-1]:.1f} GB/s, registers multiplied at up to {peak:,.0f} GFLOP/s. "
        f"{sum(share.is_met for share in barred)} of {len(barred)} bars are met."
    )
