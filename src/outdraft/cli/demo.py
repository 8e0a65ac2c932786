"""`outdraft demo`: the embedded pair completes held-out prompts, plain and with every method.

It shows who guessed each token, and a table.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outdraft import assets
from outdraft.cli.command import Json, cells_of, held_out, table_of, use_physical_cores
from outdraft.cli.options import takes_options
from outdraft.core.draft import DraftSource
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams

if TYPE_CHECKING:
    from outdraft.bench.side_by_side import Samples
    from outdraft.config.engine import EngineConfig
    from outdraft.engine.llm import LLM
    from outdraft.text.detokenizer import Detokenizer

SHOWN = "combined"  # the method whose text is printed
# Text at this temperature does not repeat itself: repetition is easy to draft.
TEMPERATURE = 0.8
SOURCES: dict[str, tuple[str, str]] = {  # label and style of each
    DraftSource.PREDICTION: ("prediction", "bold magenta"),
    DraftSource.SUFFIX: ("suffix", "bold cyan"),
    DraftSource.NGRAM: ("n-gram", "bold yellow"),
    DraftSource.MODEL: ("draft model", "bold green"),
    DraftSource.EAGLE: ("EAGLE", "bold blue"),
    DraftSource.EAGLE3: ("EAGLE-3", "bold bright_blue"),
    DraftSource.MEDUSA: ("Medusa", "bold red"),
    DraftSource.MLP: ("MLP speculator", "bold bright_magenta"),
    DraftSource.DFLASH: ("DFlash", "bold bright_green"),
    DraftSource.DSPARK: ("DSpark", "bold bright_yellow"),
    DraftSource.MTP: ("MTP", "bold bright_white"),
    DraftSource.SELF: ("self", "bold bright_cyan"),
}
METHODS = {  # columns of their table
    "method": "{name}",
    "tokens/s": "{tokens_per_s:.1f}",
    "TPOT ms": "{tpot_ms:.2f}",
    "acceptance": "{acceptance_rate:.0%}",
    "length": "{acceptance_length:.2f}",
    "speedup": "{speedup:.2f}x",
    "identical": "{same}",
}
PROMPT_LINES = 4  # of the end of each prompt


@takes_options
def demo(
    json_: Json = False,
    max_tokens: Annotated[int, typer.Option(min=2)] = 96,
    prompts: Annotated[int, typer.Option(min=1)] = 4,
    temperature: Annotated[float, typer.Option(min=0)] = TEMPERATURE,
    dtype: str = "auto",
) -> None:
    """Measure what speculation gains on this machine's CPU.

    Exits with 1 if any method changes a single token of what plain decoding gives.

    Args:
        max_tokens: Tokens to complete a prompt by.
        prompts: How many prompts.
        temperature: 0 is greedy, which a small model answers by repeating itself.
        dtype: What to compute in: float32 or bfloat16.
    """
    *chosen, (_, warm_up) = held_out(prompts)
    use_physical_cores(os.environ)
    from outdraft.bench.side_by_side import as_json, complete_in_turn, method_configs

    started_s = time.monotonic()
    heads = {method: assets.head_path(method) for method in assets.available_heads()}
    llms = load(method_configs(assets.target_path(), assets.drafter_path(), heads, dtype))
    view = None if json_ else DemoView(Console(highlight=False), llms[SHOWN], chosen)
    if view is not None:
        view.header()
    # Each prompt has a seed, so every engine has to give the same tokens at any temperature.
    base = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    compared = complete_in_turn(
        {name: llm.engine for name, llm in llms.items()},
        warm_up,
        [text for _, text in chosen],
        [replace(base, seed=number) for number in range(prompts)],
        on_step=lambda name, output: view.show(output) if view and name == SHOWN else None,
    )
    report = as_json(compared)
    if view is None:
        typer.echo(json.dumps({"temperature": temperature} | report))
    else:
        view.footer(compared, temperature, time.monotonic() - started_s)
    if not all(one["identical"] for one in report["methods"].values()):
        raise typer.Exit(1)


def load(configs: Mapping[str, "EngineConfig"]) -> dict[str, "LLM"]:
    """An engine for each configuration, all over the same weights, loaded once."""
    from outdraft.bench.side_by_side import share_target
    from outdraft.engine.llm import LLM

    models = share_target(configs)
    return {name: LLM.from_config(config, models[name]) for name, config in configs.items()}


class DemoView:
    """Prints one engine's texts while they grow, then the comparison."""

    def __init__(self, console: Console, llm: "LLM", prompts: Sequence[tuple[str, str]]) -> None:
        self._console = console
        self._llm = llm
        self._sources = llm.config.speculation.methods
        self._coming = iter(prompts)
        self._current: RequestOutput | None = None
        self._detokenizer: Detokenizer | None = None
        self._num_shown = 0

    def header(self) -> None:
        """Print the memory that engines take, and the meaning of the colours."""
        table = Table("memory", "", box=None)
        for row in self._llm.memory.table():
            table.add_row(*row)
        self._console.print(table)
        legend = Text("\nPlain text: chosen by the target. Accepted drafts: ")
        for index, origin in enumerate(self._sources):
            legend.append(", " if index else "").append(*SOURCES[origin])
        self._console.print(legend.append("."))

    def show(self, output: RequestOutput) -> None:
        """Print the tokens that came since the last call."""
        if output is not self._current:
            self._begin(output)
        detokenizer = self._detokenizer
        assert detokenizer is not None
        token_ids, origins = output.outputs[0].token_ids, output.outputs[0].origins
        grown, start = Text(), len(detokenizer.text)
        for place in range(self._num_shown, len(token_ids)):
            detokenizer.push(token_ids[place])
            grown.append(detokenizer.text[start:], SOURCES.get(origins[place], ("", None))[1])
            start = len(detokenizer.text)
        if output.finished:
            detokenizer.finish()
            grown.append(detokenizer.text[start:])
        self._num_shown = len(token_ids)
        self._console.print(grown, end="", soft_wrap=True)

    def footer(
        self, compared: "Mapping[str, Samples]", temperature: float, elapsed_s: float
    ) -> None:
        """Print the comparison.

        Args:
            compared: what each method completed, plain decoding under PLAIN.
            elapsed_s: of everything.
        """
        from outdraft.bench.side_by_side import PLAIN, as_json

        report = as_json(compared)
        numbers = self._llm.models.target.numbers
        self._console.print(
            f"\n\nTemperature {temperature:g}, {numbers}, one request at a time", style="bold"
        )
        rows = [
            {"name": name, "same": "yes" if one["identical"] else "[bold red]NO[/]"} | one
            for name, one in report["methods"].items()
        ]
        own = report[PLAIN]
        plain = PLAIN, f"{own['tokens_per_s']:.1f}", f"{own['tpot_ms']:.2f}", "", "", "1.00x", ""
        cells = [plain, *cells_of(rows, METHODS)]
        fits_80_columns = (0, 1, 0, 0)
        self._console.print(table_of(METHODS, cells, box=SIMPLE_HEAD, padding=fits_80_columns))
        self._console.print(
            "acceptance: accepted per drafted token; length: tokens a step that verified drafts, "
            "the target's own one included. Each method drafts in every step here; where nothing "
            "else is asked, outdraft drafts only what pays.",
            style="dim",
        )
        self._console.print(_sources(compared, self._sources))
        read = self._llm.models.target.weight_bytes
        self._console.print(
            f"A plain step reads {read / 1e6:.1f} MB of weights: "
            f"{read * own['tokens_per_s'] / 1e9:.1f} GB/s; what the memory can give is "
            "the floor of its time."
        )
        self._console.print(f"{elapsed_s:.0f} s in all, loading and warming up included.")

    def _begin(self, output: RequestOutput) -> None:
        path, prompt = next(self._coming)
        from outdraft.text.detokenizer import Detokenizer

        tokenizer = self._llm.models.tokenizer
        assert tokenizer is not None
        self._current, self._num_shown = output, 0
        self._detokenizer = Detokenizer(tokenizer, ())
        self._console.print(Text(f"\n\n# {path}", "bold"))
        end = prompt.splitlines()[-PROMPT_LINES:]
        self._console.print(Text("\n".join(end), "dim"), end="", soft_wrap=True)


def _sources(compared: "Mapping[str, Samples]", sources: Sequence[str]) -> Text:
    """Say who chose the tokens of the last, most elaborate method."""
    name, samples = list(compared.items())[-1]
    counts = Counter(origin for sample in samples for origin in sample.origins)
    total = max(1, counts.total())
    line = Text(f"{name} made {total} tokens. The target chose ")
    drafted = sum(counts[origin] for origin in SOURCES)
    line.append(f"{(total - drafted) / total:.0%}")
    for origin in sources:
        label, style = SOURCES[origin]
        line.append(", ").append(f"{label} {counts[origin] / total:.0%}", style)
    return line.append(".")
