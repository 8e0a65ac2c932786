"""What `outdraft demo` shows to people: who guessed each token, and a table."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outdraft.assets import HeldOutPrompt
from outdraft.bench.side_by_side import (
    PLAIN,
    acceptance_length,
    acceptance_rate,
    are_identical,
)
from outdraft.cli.command import table_of
from outdraft.cli.comparison import Samples, speedup, tokens_per_s, tpot_ms
from outdraft.core.outputs import RequestOutput, TokenOrigin
from outdraft.engine.llm import LLM
from outdraft.text.detokenizer import Detokenizer

SOURCES = {  # label and style of each
    TokenOrigin.PREDICTION: ("prediction", "bold magenta"),
    TokenOrigin.SUFFIX: ("suffix", "bold cyan"),
    TokenOrigin.NGRAM: ("n-gram", "bold yellow"),
    TokenOrigin.MODEL: ("draft model", "bold green"),
    TokenOrigin.EAGLE: ("EAGLE", "bold blue"),
    TokenOrigin.EAGLE3: ("EAGLE-3", "bold bright_blue"),
    TokenOrigin.MEDUSA: ("Medusa", "bold red"),
    TokenOrigin.MLP: ("MLP speculator", "bold bright_magenta"),
    TokenOrigin.DFLASH: ("DFlash", "bold bright_green"),
    TokenOrigin.DSPARK: ("DSpark", "bold bright_yellow"),
    TokenOrigin.MTP: ("MTP", "bold bright_white"),
    TokenOrigin.SELF: ("self", "bold bright_cyan"),
}
PROMPT_LINES = 4  # of the end of each prompt


class DemoView:
    """Prints one engine's texts while they grow, then the comparison."""

    def __init__(self, console: Console, llm: LLM, prompts: Sequence[HeldOutPrompt]) -> None:
        self._console = console
        self._llm = llm
        self._sources = [TokenOrigin(str(name)) for name in llm.config.speculation.methods]
        self._coming = iter(prompts)
        self._current: RequestOutput | None = None
        self._detokenizer: Detokenizer | None = None
        self._num_shown = 0

    def header(self) -> None:
        """What is compared, in how much memory, and what the colours mean."""
        memory = Table("memory", "", box=None)
        for name, size in self._llm.memory.table():
            memory.add_row(name, size)
        self._console.print(memory)
        legend = Text("\nPlain text: chosen by the target. Accepted drafts: ")
        for index, origin in enumerate(self._sources):
            legend.append(", " if index else "").append(*SOURCES[origin])
        self._console.print(legend.append("."))

    def show(self, output: RequestOutput) -> None:
        """Print the tokens that came since the last call."""
        if output is not self._current:
            self._begin(output)
        assert self._detokenizer is not None
        completion = output.outputs[0]
        grown = Text()
        for token_id, origin in zip(
            completion.token_ids[self._num_shown :],
            completion.origins[self._num_shown :],
            strict=True,
        ):
            start = len(self._detokenizer.text)
            self._detokenizer.push(token_id)
            grown.append(self._detokenizer.text[start:], SOURCES.get(origin, ("", None))[1])
        if output.finished:
            start = len(self._detokenizer.text)
            self._detokenizer.finish()
            grown.append(self._detokenizer.text[start:])
        self._num_shown = len(completion.token_ids)
        self._console.print(grown, end="", soft_wrap=True)

    def footer(self, compared: Mapping[str, Samples], temperature: float, elapsed_s: float) -> None:
        """The comparison."""
        plain = compared[PLAIN]
        numbers = self._llm.models.target.numbers
        self._console.print(
            f"\n\nTemperature {temperature:g}, {numbers}, one request at a time", style="bold"
        )
        headings = "tokens/s", "TPOT ms", "acceptance", "length", "speedup", "identical"
        # Fits into 80 columns.
        table = table_of(["method"], headings, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name, samples in compared.items():
            speed = [f"{tokens_per_s(samples):.1f}", f"{tpot_ms(samples):.2f}"]
            if name == PLAIN:
                table.add_row(name, *speed, "", "", "1.00x", "")
                continue
            table.add_row(
                name,
                *speed,
                f"{acceptance_rate(samples):.0%}",
                f"{acceptance_length(samples):.2f}",
                f"{speedup(samples, plain):.2f}x",
                "yes" if are_identical(samples, plain) else "[bold red]NO[/]",
            )
        self._console.print(table)
        self._console.print(
            "acceptance: accepted per drafted token; length: tokens a step that verified drafts, "
            "the target's own one included. Each method drafts in every step here; where nothing "
            "else is asked, outdraft drafts only what pays.",
            style="dim",
        )
        self._console.print(_sources(compared, self._sources))
        self._console.print(self._bandwidth(plain))
        self._console.print(f"{elapsed_s:.0f} s in all, loading and warming up included.")

    def _begin(self, output: RequestOutput) -> None:
        prompt = next(self._coming)
        tokenizer = self._llm.models.tokenizer
        assert tokenizer is not None
        self._current, self._num_shown = output, 0
        self._detokenizer = Detokenizer(tokenizer, ())
        self._console.print(Text(f"\n\n# {prompt.path}", "bold"))
        end = prompt.text.splitlines()[-PROMPT_LINES:]
        self._console.print(Text("\n".join(end), "dim"), end="", soft_wrap=True)

    def _bandwidth(self, plain: Samples) -> str:
        read = self._llm.models.target.weight_bytes
        per_s = read * tokens_per_s(plain) / 1e9
        return (
            f"A plain step reads {read / 1e6:.1f} MB of weights: {per_s:.1f} GB/s; what the "
            "memory can give is the floor of its time."
        )


def _sources(compared: Mapping[str, Samples], sources: Sequence[TokenOrigin]) -> Text:
    """Who chose the tokens of the last, most elaborate method."""
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
