"""Rows of a block: drafted rows that all see each other, as DFlash reads them."""

from dataclasses import replace

import pytest
import torch

from outdraft.attention.base import AttentionForm
from outdraft.kernels.torch.attention import TorchAttention
from tests.attention.ragged import Model, Shape, build_batch
from tests.kernels.tables import native_attention

BLOCKS = {  # rows of each request's block and tokens before it, and a window
    "one block": ([(5, 11)], None),
    "behind nothing": ([(4, 0)], None),
    "several": ([(16, 3), (16, 70), (16, 33)], None),
    "the longest": ([(63, 20)], None),
    "in a window": ([(5, 40), (5, 2)], 9),
    "as long as the window": ([(7, 40)], 7),
}
MODEL = Model(4, 2, 16, 4)


def backends() -> dict[str, object]:
    triton = pytest.importorskip("outdraft.kernels.triton.attention", reason="needs triton")
    return {
        "reference": TorchAttention(),
        "in-order": TorchAttention(in_order=True),
        "native": native_attention(),
        "triton": triton.TritonAttention(),
    }


@pytest.mark.parametrize("backend", ["reference", "in-order", "native", "triton"])
@pytest.mark.parametrize("case", BLOCKS)
def test_every_row_sees_the_text_and_the_whole_block(case: str, backend: str):
    blocks, window = BLOCKS[case]
    requests = [
        Shape(context, 0, tuple(range(size)), tuple(range(size))) for size, context in blocks
    ]
    batch = build_batch(requests, MODEL, torch.float32, seed=3)
    masks_T = torch.cat([torch.full((size,), (1 << size) - 1) for size, _ in blocks])
    metadata = replace(batch.metadata, ancestors_T=masks_T)
    form = AttentionForm(MODEL.head_size**-0.5, window)
    found_THC = backends()[backend].attend(batch.q_THC, batch.cache, metadata, form)
    first = 0
    for (size, context), k_KGC, v_KGC in zip(
        blocks, batch.k_by_request, batch.v_by_request, strict=True
    ):
        for row in range(size):
            start = 0 if window is None else max(0, min(context, context + row - window + 1))
            for head in range(MODEL.num_heads):
                kv = head * MODEL.num_kv_heads // MODEL.num_heads
                scores_K = k_KGC[start:, kv] @ batch.q_THC[first + row, head] * form.scale
                wanted_C = scores_K.softmax(0) @ v_KGC[start:, kv]
                got_C = found_THC[first + row, head]
                torch.testing.assert_close(got_C, wanted_C, rtol=1e-4, atol=1e-5)
        first += size
