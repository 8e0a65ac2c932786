"""What `outdraft bench methods` shows to people."""

from typing import Any

from outdraft.bench.methods import TEMPERATURES, temperature_key
from outdraft.bench.side_by_side import PLAIN
from outdraft.cli.command import table_of, wide_console


def show(result: dict[str, Any]) -> None:
    """The table, and below it what its columns mean."""
    console = wide_console(110)
    console.print(
        f"One request at a time: {result['num_prompts']} prompts of {result['max_tokens']} tokens, "
        f"{result['dtype']}, {result['device']}",
        style="bold",
    )
    keys = [temperature_key(temperature) for temperature in TEMPERATURES]
    lengths, speeds = (
        [f"{what}\nT = {temperature}" for temperature in TEMPERATURES]
        for what in ("length", "tokens/s")
    )
    more = "weights\nMiB", "KV KiB\nper 1k", "same\nids"
    table = table_of(["method"], [*lengths, "draft\nms", "verify\nms", *speeds, *more])
    for name, numbers in ({PLAIN: result[PLAIN]} | result["methods"]).items():
        runs = [numbers[key] for key in keys]
        is_plain = name == PLAIN
        table.add_row(
            name,
            *("" if is_plain else f"{run['acceptance_length']:.2f}" for run in runs),
            "" if is_plain else f"{runs[0]['draft_ms']:.2f}",
            f"{runs[0]['verify_ms']:.2f}",
            *(f"{run['tokens_per_s']:.0f} {run['ratio_to_plain']:.2f}x" for run in runs),
            f"{numbers['weight_bytes'] / 2**20:.1f}",
            f"{numbers['kv_bytes_per_1k_tokens'] / 2**10:.0f}",
            "" if is_plain else "yes" if numbers["identical"] else "[bold red]NO[/]",
        )
    console.print(table)
    console.print(
        "length: tokens a verified draft brought, the target's own one included. draft, verify: a "
        "step at T = 0. tokens/s: median of the prompts, and of their ratios to plain decoding. "
        "KV: of a thousand tokens, beside the target's. same ids: as plain decoding at T = 0.",
        style="dim",
    )
    searches = {
        name: numbers["draft_us_per_request_32k"]
        for name, numbers in result["methods"].items()
        if "draft_us_per_request_32k" in numbers
    }
    if searches:
        listed = ", ".join(f"{name} {us:.1f} us" for name, us in searches.items())
        console.print(f"A draft behind a text of 32k tokens: {listed}.")
    if result["all_identical"]:
        console.print("At T = 0 every method gave plain decoding's tokens.")
    else:
        changed = [name for name, one in result["methods"].items() if not one["identical"]]
        console.print(f"[bold red]At T = 0 tokens were changed by {', '.join(changed)}.[/]")
