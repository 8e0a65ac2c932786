"""Engines whose outputs can be given a form, random forms, and what it means to have them."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from outdraft.config.engine import EngineConfig
from outdraft.core.sampling import SamplingParams, StructuredOutput
from outdraft.engine.llm import LLM
from outdraft.loading.models import LoadedModels, load_models
from tests.engine.byte_level import tokenizer
from tests.folders import new_folder
from tests.models.checkpoints import llama, randomised, save
from tests.oracle.engines import BASIC, TREE
from tests.oracle.heads import random_head

EOS, MAX_LEN = 1, 640
PROMPTS = ([70, 71, 72, 70, 71, 72, 70], [2, 3, 4, 5, 200, 201], [9] * 20)


@dataclass(frozen=True)
class Form:
    """What to ask for, and whether a text is like that."""

    structured: StructuredOutput
    is_met: Callable[[str], bool]


@cache
def folders() -> tuple[Path, Path]:
    """A target and another model of the same vocabulary."""
    folder = new_folder()
    size = {"vocab_size": tokenizer().get_vocab_size(), "max_position_embeddings": MAX_LEN}
    target = save(randomised(llama(**size)), folder / "target")
    drafter = save(randomised(llama(num_hidden_layers=1, **size), seed=5), folder / "drafter")
    for path in (target, drafter):
        tokenizer().save(str(path / "tokenizer.json"))
    return target, drafter


@cache
def models(method: str, drafter: Path, device: str, kernels: str, dtype: str) -> LoadedModels:
    speculative = {"method": method, "model": str(drafter)}
    return load_models(config(speculative, device=device, kernels=kernels, dtype=dtype))


@cache
def head(method: str) -> Path:
    return random_head(method, folders()[0], new_folder() / method)


def config(speculative: dict[str, Any] | None, **options: Any) -> EngineConfig:
    defaults = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "num_blocks": 200}
    return EngineConfig.from_options(
        model=str(folders()[0]), speculative_config=speculative, **defaults | options
    )


METHODS = (*BASIC, "perfect-tree", "eagle3-tree", "medusa")


def engine(method: str, rule: str = "block", **options: Any) -> LLM:
    """`method` as in tests.oracle.engines."""
    target, other = folders()
    name = method.removesuffix("-tree")
    if name in ("eagle3", "medusa"):
        kind, drafter = name, head(name)
    else:
        kind, drafter = "draft_model", target if name == "perfect" else other
    speculative: dict[str, Any] = {
        "method": kind if name in ("perfect", kind) else name,
        "rejection_sample_method": rule,
        "control": "fixed",
    }
    speculative |= TREE if method.endswith("-tree") else {"num_speculative_tokens": 4}
    if name in ("ngram", "combined"):
        speculative["prompt_lookup_min"] = 1
    if name not in ("ngram", "suffix"):
        speculative["model"] = str(drafter)
    chosen = config(None if method == "plain" else speculative, **options)
    loaded = models(kind, drafter, chosen.device, chosen.kernels, chosen.dtype)
    return LLM.from_config(chosen, loaded)


def sparse_engine(rule: str = "block") -> LLM:
    """The target drafts for itself over 16 tokens of each text."""
    speculative = {"method": "self", "kv_budget": 16, "num_speculative_tokens": 4}
    speculative |= {"rejection_sample_method": rule, "control": "fixed"}
    chosen = config(speculative, block_size=4, num_blocks=800)
    return LLM.from_config(chosen, models_of_self())


@cache
def models_of_self() -> LoadedModels:
    return load_models(config({"method": "self", "kv_budget": 16}))


def asking(form: Form, **changes: Any) -> SamplingParams:
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": 600, "seed": 3}
    return SamplingParams(structured=form.structured, **defaults | changes)


REGEXES = (
    r"[a-z]{2,5}@(home|work)\.org",
    r"([0-9]{1,3}\.){3}[0-9]{1,3}",
    r"(the cat|the mat|on ){1,4}",
    r"[^a-y]{0,6}z",
    r"-?(0|[1-9][0-9]{0,4})(\.[0-9]{1,2})?",
)


def regex(pattern: str) -> Form:
    return Form(
        StructuredOutput("regex", pattern), lambda text: re.fullmatch(pattern, text) is not None
    )


def schema(value: dict[str, Any]) -> Form:
    """White space could go on for as long as the model likes: there is none here."""
    text = json.dumps(value | {"x-guidance": {"whitespace_flexible": False}})
    return Form(
        StructuredOutput("json_schema", text), lambda text: follows(json.loads(text), value)
    )


_leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"enum": ["on", "off", 3]}]),
    st.integers(-50, 50).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 99}),
    st.integers(0, 3).map(lambda most: {"type": "string", "maxLength": most}),
)


@st.composite
def _arrays(draw, items: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    least = draw(st.integers(0, 2))
    most = least + draw(st.integers(0, 1))
    return {"type": "array", "items": draw(items), "minItems": least, "maxItems": most}


@st.composite
def _objects(draw, values: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(["a", "cat", "stop", "é"]), max_size=3, unique=True))
    return {
        "type": "object",
        "properties": {name: draw(values) for name in names},
        "required": [name for name in names if draw(st.booleans())],
        "additionalProperties": False,
    }


schemas = st.recursive(_leaves, lambda inner: _arrays(inner) | _objects(inner), max_leaves=4)
forms = st.sampled_from(REGEXES).map(regex) | schemas.map(schema)


def follows(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a JSON value is what a schema of `schemas` describes."""
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            return is_whole and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "array":
            fits = isinstance(value, list) and len(value) <= schema["maxItems"]
            fits = fits and len(value) >= schema["minItems"]
            return fits and all(follows(item, schema["items"]) for item in value)
        case _:
            known = schema["properties"]
            fits = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(known)
            return fits and all(follows(item, known[name]) for name, item in value.items())
