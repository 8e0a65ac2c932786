"""Writes the trained draft heads where the package finds them, and their part of its model card.

A head that is not trained yet is left out, and so is DFlash's, which DSpark's goes on from; what
the card says of the pair stays as it is.
"""

import argparse
import json
import shutil
from pathlib import Path
from string import Template
from typing import Any

TITLES = {
    "eagle3": "EAGLE-3",
    "medusa": "Medusa-1",
    "mlp_speculator": "MLPSpeculator",
    "dspark": "DSpark",
}
HEADING, NEXT_HEADING = "## Draft heads\n", "## Limits\n"


def facts_of(trained: Path, tokens_before: int) -> dict[str, str]:
    """What the card's table says of one head, from its log and its measurement.

    `tokens_before`: what the head that `--init` named had seen.
    """
    log = json.loads((trained / "log.jsonl").read_text().splitlines()[-1])
    measured: dict[str, Any] = json.loads((trained / "acceptance.json").read_text())
    config: dict[str, Any] = json.loads((trained / "model" / "config.json").read_text())
    size = (trained / "model" / "model.safetensors").stat().st_size
    facts = {
        "parameters": f"{measured['parameters']:,}",
        "file, MB": f"{size / 1e6:.1f}",
        "training tokens": f"{tokens_before + log['tokens']:,}",
        "tokens it can draft": f"{config.get('draft_vocab_size', config['vocab_size']):,}",
    }
    for kind, title in (("greedy", "greedy"), ("sampled", "temperature 1")):
        facts[f"acceptance rate of a first draft, {title}"] = f"{measured[f'{kind}_rates'][0]:.1%}"
        for num_drafts, length in measured[f"{kind}_acceptance_length"].items():
            facts[f"acceptance length, {title}, K = {num_drafts}"] = f"{length:.2f}"
    return facts


def card_section(heads: dict[str, dict[str, str]]) -> str:
    """The section on `heads`, by name; each has the same facts."""
    template = Template((Path(__file__).parent / "model_card.md").read_text(encoding="utf-8"))
    labels = next(iter(heads.values()))
    rows = [" | ".join([label, *(facts[label] for facts in heads.values())]) for label in labels]
    return template.substitute(
        names=" | ".join(TITLES[name] for name in heads),
        rule="---|" * len(heads),
        rows="\n".join(f"| {row} |" for row in rows),
    )


def with_section(card: str, section: str) -> str:
    """The card with its section on draft heads replaced, or put before its limits."""
    before, _, rest = card.partition(HEADING)
    if rest:
        rest = rest[rest.index(NEXT_HEADING) :]
    else:
        cut = card.index(NEXT_HEADING)
        before, rest = card[:cut], card[cut:]
    return f"{before}{section}\n{rest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the trained heads")
    parser.add_argument("--out", type=Path, required=True, help="the package's assets folder")
    args = parser.parse_args()
    trained = {name: args.data / name for name in TITLES}
    trained = {name: path for name, path in trained.items() if (path / "acceptance.json").exists()}
    for name, path in trained.items():
        (args.out / name).mkdir(exist_ok=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(path / "model" / file, args.out / name / file)
    earlier = args.data.parent / "before.json"
    before = json.loads(earlier.read_text()) if earlier.exists() else {}
    section = card_section(
        {name: facts_of(path, before.get(name, 0)) for name, path in trained.items()}
    )
    card = args.out / "README.md"
    card.write_text(with_section(card.read_text(encoding="utf-8"), section), encoding="utf-8")


if __name__ == "__main__":
    main()
