"""Whole engines with the graphs of a GPU, made at the start for passes, drafts and choices.

What stands for a graph repeats its launches, and the launches are the reference's: Triton's own
would be interpreted for minutes. They are compared elsewhere (tests/kernels/test_triton_*.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from outdraft.attention.base import AttentionForm, AttentionMetadata, LayerCache
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM
from outdraft.kernels.data.graph_sizes import rounded_rows
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch.attention import TorchAttention
from outdraft.kernels.torch.decoder import TorchDecoder
from outdraft.kernels.torch.table import reference_kernels
from outdraft.loading import models as loading
from tests.oracle.engines import config, engine, greedy, ids, prompts_of, run, speculation
from tests.pairwise import some

pytest.importorskip("triton", reason="needs triton")
from outdraft.kernels.triton import graphs
from outdraft.kernels.triton.decoder import TritonDecoder
from outdraft.kernels.triton.graphed import GraphedGrowth, GraphedVerification

FAMILY, NUM_DRAFTS, LENGTHS = "qwen2", 3, (3, 14, 9)
METHODS = some(
    ["plain", "ngram", "draft_model", "draft_model-tree", "eagle3", "medusa", "dflash"],
    chosen=["eagle3"],
)


class OfRows(TorchAttention):
    """Attends for the rows that are no padding."""

    def attend(
        self, q_THC: Tensor, cache: LayerCache, metadata: AttentionMetadata, form: AttentionForm
    ) -> Tensor:
        counts_B = metadata.query_start_B1.diff()
        number, num_rows = int((counts_B > 0).sum()), int(counts_B.sum())
        assert bool((counts_B[:number] > 0).all()), "padding stands behind all requests"
        rows = replace(
            metadata,
            query_start_B1=metadata.query_start_B1[: number + 1],
            context_lens_B=metadata.context_lens_B[:number],
            num_causal_B=metadata.num_causal_B[:number],
            ancestors_T=metadata.ancestors_T[:num_rows],
            positions_T=metadata.positions_T[:num_rows],
            slots_T=metadata.slots_T[:num_rows],
            block_table_BP=metadata.block_table_BP[:number],
            max_rows=int(counts_B.max()),
        )
        out_THE = super().attend(q_THC[:num_rows], cache, rows, form)
        padding = out_THE.new_zeros(len(q_THC) - num_rows, *out_THE.shape[1:])
        return torch.cat([out_THE, padding])


class ReadableDecoder(TritonDecoder):
    """Its graphs are those of a GPU, and what becomes one is the reference."""

    def _all_rows(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int],
        states_TD: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return TorchDecoder(self._spec)(token_ids_T, caches, metadata, taps, states_TD)


class Repeated:
    """As `DeviceCapture`."""

    num_made = num_repeated = 0

    def __call__(self, launch: Callable[[], object]) -> tuple[Callable[[], object], object]:
        Repeated.num_made += 1
        results = launch()

        def replay() -> None:
            Repeated.num_repeated += 1
            again = launch()
            if isinstance(results, tuple) and all(isinstance(one, torch.Tensor) for one in results):
                assert isinstance(again, tuple)
                for kept, made in zip(results, again, strict=True):
                    kept.copy_(made)

        return replay, results


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Makes an engine with graphs."""

    def choose(*_: object, has_graphs: bool, activation_dtype: str) -> Kernels:
        assert has_graphs
        assert activation_dtype == "auto"
        kernels = replace(reference_kernels(), attention=OfRows())
        verification = GraphedVerification(kernels)
        return replace(
            kernels,
            grow=GraphedGrowth(kernels.warm_ups),
            verify=verification.verify,
            choose=verification.choose,
            padded_draft_batch=rounded_rows,
            compile_decoder=partial(ReadableDecoder, has_graphs=True, warm_ups=kernels.warm_ups),
        )

    monkeypatch.setattr(loading, "choose_kernels", choose)
    monkeypatch.setattr(graphs, "DeviceCapture", Repeated)
    monkeypatch.setattr(Repeated, "num_made", 0)
    monkeypatch.setattr(Repeated, "num_repeated", 0)

    def make(method: str, **options: object) -> LLM:
        chosen = config(FAMILY, speculation(FAMILY, method, NUM_DRAFTS), dtype="float32", **options)
        return LLM.from_config(chosen)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_ids_are_those_of_plain_decoding(method: str, graphed: Callable[..., LLM]):
    plain = engine(FAMILY, "plain", dtype="float32", kernels="reference")
    prompts = prompts_of(LENGTHS)
    seeded = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=10, ignore_eos=True) for i in range(3)
    ]
    want = [ids(run(plain, prompts, params)) for params in (greedy(10), seeded)]
    llm = graphed(method)
    assert (made := Repeated.num_made) > 0
    assert [ids(run(llm, prompts, params)) for params in (greedy(10), seeded)] == want
    assert Repeated.num_repeated > made
    drawn = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    outputs = run(llm, prompts, drawn)
    assert all(len(output.outputs[0].token_ids) == 10 for output in outputs)
