"""Engines over tiny random checkpoints, and what transformers says they must answer."""

import json
import shutil
from collections.abc import Collection, Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedModel

from outdraft.config.engine import EngineConfig
from outdraft.control.facts import StepFacts
from outdraft.control.policy import FixedLength
from outdraft.core.draft import Draft, DraftSource
from outdraft.core.outputs import RequestDelta, RequestOutput
from outdraft.core.plan import DraftChoice
from outdraft.core.request import Request
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.policy import DraftPolicy
from outdraft.engine.llm import LLM
from outdraft.loading.models import LoadedModels, load_models
from tests.folders import new_folder
from tests.models.checkpoints import VARIANTS, llama, randomised, save
from tests.models.families import randomised_family
from tests.models.mtp_checkpoints import add_library_layer, add_mimo_layer
from tests.oracle.heads import random_head
from tests.pairwise import some

VOCAB_SIZE = 61
LIBRARY = "transformers/"  # before a family whose network the library computes
MIMO = "mimo"
MTP_FAMILIES = (MIMO, f"{LIBRARY}deepseek-v3", f"{LIBRARY}glm-4-moe", f"{LIBRARY}mellum")
FAMILIES = ("llama-llama3-rope", "mistral-window", "qwen2", "qwen3-window")


@dataclass(frozen=True)
class Pair:
    """A target, a drafter of its vocabulary, and transformers' own target."""

    target: Path
    drafter: Path
    oracle: PreTrainedModel


@cache
def pair(family: str) -> Pair:
    """Made once; the drafter is another random model."""
    folder = new_folder()
    if family == MIMO:
        oracle = randomised(VARIANTS["qwen2"]())
    elif family in VARIANTS:
        oracle = randomised(VARIANTS[family]())
    else:
        oracle = randomised_family(family.removeprefix(LIBRARY))
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        setattr(oracle.generation_config, name, None)
    drafter = randomised(llama(num_hidden_layers=1), seed=5)
    if family != "qwen2":  # on a CPU such weights take the compiled pass, others the layers
        for weight in (*oracle.parameters(), *drafter.parameters()):  # not frequencies
            weight.data = weight.data.bfloat16().float()
    paths = save(oracle, folder / "target"), save(drafter, folder / "drafter")
    if family in MTP_FAMILIES:
        (add_mimo_layer if family == MIMO else add_library_layer)(paths[0])
    for path in paths:
        tokenizer().save(str(path / "tokenizer.json"))
    return Pair(*paths, oracle)


def tokenizer() -> Tokenizer:
    """Token i is the word "wi"."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return words


@cache
def models(
    family: str, network: tuple[str, str] | None, dtype: str, device: str, kernels: str
) -> LoadedModels:
    """Loaded once per family and network, which is a method and a path, or how the target's weights
    are kept that draft for it."""
    options = {"dtype": dtype, "device": device, "kernels": kernels}
    speculative = None
    if network is not None:
        named = {"self": "quantization", "mtp": None}.get(network[0], "model")
        speculative = {"method": network[0]} | ({named: network[1]} if named else {})
        if network[1].endswith("masked"):
            speculative |= {"parallel_drafting": True}
    return load_models(config(family, speculative, **options))


def config(family: str, speculative: dict[str, Any] | None, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "num_blocks": 64,
        "cost_table": "roofline",  # nothing hangs on the machine
        "model_impl": "transformers" if family.startswith(LIBRARY) else "outdraft",
    }
    return EngineConfig.from_options(
        model=str(pair(family).target), speculative_config=speculative, **defaults | options
    )


TREE = {"tree_levels": [2, 3, 1]}
# Trees have rows of their own, whatever number of drafts is asked for.
NETWORKS: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "model": "drafter"},
    "perfect": {"method": "draft_model", "model": "target"},
    "draft_model-tree": {"method": "draft_model", "model": "drafter", **TREE},
    "perfect-tree": {"method": "draft_model", "model": "target", **TREE},
    "pard": {"method": "draft_model", "model": "masked", "parallel_drafting": True},
    "eagle": {"method": "eagle", "model": "eagle"},
    "eagle-tree": {"method": "eagle", "model": "eagle", **TREE},
    "eagle3": {"method": "eagle3", "model": "eagle3"},
    "eagle3-tree": {"method": "eagle3", "model": "eagle3", **TREE},
    "p-eagle": {"method": "eagle3", "model": "p-eagle-masked", "parallel_drafting": True},
    "medusa": {"method": "medusa", "model": "medusa"},
    "medusa-tree": {"method": "medusa", "model": "medusa", **TREE},
    "self": {"method": "self", "quantization": "int4"},
    "self-tree": {"method": "self", "quantization": "int4", **TREE},
    "mlp_speculator": {"method": "mlp_speculator", "model": "mlp_speculator"},
    "mlp_speculator-tree": {"method": "mlp_speculator", "model": "mlp_speculator", **TREE},
    "dflash": {"method": "dflash", "model": "dflash"},
    "dflash-tree": {"method": "dflash", "model": "dflash", **TREE},
    "dspark": {"method": "dspark", "model": "dspark"},
    "dspark-tree": {"method": "dspark", "model": "dspark", **TREE},
}
# Only families whose checkpoints hold such layers: `MTP_FAMILIES`.
MTP: dict[str, dict[str, Any]] = {
    "mtp": {"method": "mtp"},
    "mtp-tree": {"method": "mtp", **TREE},
}
HOST: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix"},
    "ngram-tree": {"method": "ngram", "prompt_lookup_min": 1, "branching": 3},
    "suffix-tree": {"method": "suffix", "branching": 3},
}
COMBINED = ("combined", "combined-eagle3")
BASIC = ("plain", "ngram", "suffix", "draft_model", "perfect", "combined")
METHODS = ("plain", *HOST, *NETWORKS, *COMBINED)
HEADS = ("medusa", "mlp_speculator")
BLOCKS = ("dflash", "dspark")
OF_ONE_SIZE = tuple(name for name in NETWORKS if name.endswith("-tree"))


def with_kernels(every: Iterable[Hashable], on_reference: Collection[Hashable]) -> list[Any]:
    """pytest's parameters: every value with "auto", and with the reference's kernels, which are
    slow; of those only the named ones run by default."""
    values = [value if isinstance(value, tuple) else (value,) for value in every]
    chosen = [value if isinstance(value, tuple) else (value,) for value in on_reference]
    quick = [(*value, "auto") for value in values]
    return some(
        [*quick, *((*value, "reference") for value in values)],
        [*quick, *((*value, "reference") for value in chosen)],
    )


def parts(method: str) -> tuple[str, str]:
    """Who drafts, and in which shape: ("eagle3", "tree")."""
    if method.endswith("-tree"):
        return method.removesuffix("-tree"), "tree"
    return method, "chain"


def speculation(family: str, method: str, num_drafts: int) -> dict[str, Any] | None:
    """vLLM-style configuration of a method by its name in the tests."""
    if method == "plain":
        return None
    common: dict[str, Any] = {"num_speculative_tokens": num_drafts, "control": "fixed"}
    if method in HOST:
        return common | HOST[method]
    if method == "combined":
        model = str(pair(family).drafter)
        return {**common, "method": "combined", "model": model, "prompt_lookup_min": 1}
    if method == "combined-eagle3":
        network = {"method": "eagle3", "model": str(checkpoint(family, "eagle3"))}
        ngram = {"method": "ngram", "prompt_lookup_min": 1, "branching": 2}
        return {**common, "sources": [ngram, {"method": "suffix"}, network]}
    chosen = MTP[method] if method in MTP else NETWORKS[method]
    if "model" in chosen:
        chosen = chosen | {"model": str(checkpoint(family, chosen["model"]))}
    if TREE.keys() & chosen:
        del common["num_speculative_tokens"]
    return common | chosen


@cache
def checkpoint(family: str, name: str) -> Path:
    """What drafts for a family: made once."""
    paths = pair(family)
    if name in ("target", "drafter"):
        return paths.target if name == "target" else paths.drafter
    folder = new_folder() / name
    if name == "masked":
        shutil.copytree(paths.drafter, folder)
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"pard_token": 0}))
        return folder
    return random_head(name.removesuffix("-masked"), paths.target, folder)


def engine(family: str, method: str, num_drafts: int = 3, **options: Any) -> LLM:
    """An engine with the weights of its family; lengths are fixed unless `control` says else."""
    speculative = speculation(family, method, num_drafts)
    for key in ("rejection_sample_method", "control"):
        value = options.pop(key, None)
        if speculative is not None and value is not None:
            speculative[key] = value
    chosen = config(family, speculative, **options)
    network = chosen.speculation.network
    key = None
    if network is not None:
        key = str(network.source), network.model or str(network.quantization)
    shared = models(family, key, chosen.dtype, chosen.device, chosen.kernels)
    return LLM.from_config(chosen, shared)


def run(llm: LLM, prompts: Sequence[list[int]], params: Any) -> list[RequestOutput]:
    """generate, with the books checked after every step; everything is given back at the end."""
    step = llm.engine.step

    def checked_step() -> list[RequestDelta]:
        deltas = step()
        llm.engine.check_invariants()
        return deltas

    llm.engine.step = checked_step
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.engine.step = step
    pool = llm.engine.scheduler.pool
    assert pool.num_free == pool.num_blocks
    return outputs


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts in which short patterns repeat, so that lookups find something."""
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        pattern = rng.integers(2, VOCAB_SIZE, size=max(2, length // 3))
        made.append(np.resize(pattern, length).tolist())
    return made


@cache
def greedy_oracle(family: str, lengths: tuple[int, ...], num_tokens: int) -> list[list[int]]:
    """What transformers' generate answers to `prompts_of(lengths)`."""
    oracle = pair(family).oracle
    answers = []
    for prompt in prompts_of(lengths):
        whole = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
        )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


def greedy(num_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **changes)


class NoisePolicy(DraftPolicy):
    """Drafts random trees, right now and then, whatever the request says."""

    def __init__(self, llm: LLM, right: dict[str, list[int]], seed: int) -> None:
        super().__init__(llm.config.speculation, [], None, FixedLength(0), 8)
        self._right = right
        self._rng = np.random.default_rng(seed)

    def choose(
        self, requests: Sequence[Request], num_running: int, room: StepFacts
    ) -> dict[str, DraftChoice]:
        return {r.id: DraftChoice(DraftSource.NGRAM, self._tree(r)) for r in requests}

    def _tree(self, request: Request) -> Draft:
        size = int(self._rng.integers(1, 12))
        parents = [int(self._rng.integers(0, row + 1)) for row in range(size)]
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        future = self._right.get(request.id, [])[request.num_output :]
        tokens = [
            future[depth - 1]
            if depth <= len(future) and self._rng.random() < 0.6
            else int(self._rng.integers(0, VOCAB_SIZE))
            for depth in depths[1:]
        ]
        return Draft(tuple(tokens), tuple(parents))


class Pass(NamedTuple):
    """A pass of the target: rows that it read, and those whose states behind it were made."""

    num_rows: int
    num_states: int


@contextmanager
def passes_of(llm: LLM) -> Generator[list[Pass]]:
    """The target's passes, which are made one by one here, not in one call with the rest."""
    model, passes = llm.engine.runner.model, list[Pass]()
    forward = model.forward_tapped

    def counted(ids_T: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        found = forward(ids_T, *rest)
        passes.append(Pass(len(ids_T), len(found[0])))
        return found

    kind, fused = type(model), type(model).fused
    model.forward_tapped, kind.fused = counted, None
    try:
        yield passes
    finally:
        del model.forward_tapped
        kind.fused = fused
