"""Predicted Outputs: the embedded target's own completion as the prediction, some tokens changed.

Plain decoding and decoding with the prediction take turns prompt by prompt, and must give the same
text: `python benchmarks/prediction.py --json FILE`.
"""

import argparse
import json
import statistics
from pathlib import Path
from random import Random

from outdraft import assets
from outdraft.bench.driver import complete_alone
from outdraft.bench.report import compute, environment
from outdraft.bench.side_by_side import PLAIN, method_configs
from outdraft.core.sampling import SamplingParams
from outdraft.engine.build import build_engine
from outdraft.loading.models import load_models

METHOD = "combined"  # what `outdraft serve` does by default


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--changed", type=float, default=0.05, help="share of wrong tokens")
    args = parser.parse_args()
    configs = method_configs(assets.target_path(), assets.drafter_path(), {})
    models = load_models(configs[METHOD])
    engines = {name: build_engine(configs[name], models)[0] for name in (PLAIN, METHOD)}
    rng = Random(0)

    def complete(name: str, text: str, prediction: list[int] | None) -> tuple[list[int], float]:
        """Ids, and tokens a second behind the first one."""
        params = SamplingParams(
            temperature=0, max_tokens=args.max_tokens, ignore_eos=True, prediction=prediction
        )
        done = complete_alone(engines[name], "prompt", text, params)
        return done.output.outputs[0].token_ids, done.num_decoded / done.decode_s

    texts = [text for _, text in assets.prompts()]
    complete(METHOD, texts[-1], complete(PLAIN, texts[-1], None)[0])  # kernels are compiled
    samples: list[dict[str, float | bool]] = []
    for text in texts[: args.prompts]:
        ids, plain = complete(PLAIN, text, None)
        changed = [
            rng.randrange(5, models.target.config.vocab_size) if rng.random() < args.changed else i
            for i in ids
        ]
        predicted_ids, predicted = complete(METHOD, text, changed)
        samples.append(
            {
                "plain_tokens_per_s": plain,
                "predicted_tokens_per_s": predicted,
                "speedup": predicted / plain,
                "is_identical": predicted_ids == ids,
            }
        )
    result = {
        "environment": environment() | compute(),
        "options": {key: str(value) for key, value in vars(args).items()},
        "speedup_median": statistics.median(one["speedup"] for one in samples),
        "texts_identical": f"{sum(one['is_identical'] for one in samples)}/{len(samples)}",
        "samples": samples,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps({k: v for k, v in result.items() if k != "samples"}, indent=1))


if __name__ == "__main__":
    main()
