"""Each form of attention against the code of the models that have it.

The text that a row is the end of, its drafted ancestors included, is computed as these models do:
the eager attention of transformers, over the masks of transformers, which have no cache and no
trees.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_overlay,
    sliding_window_overlay,
)
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from outdraft.attention.base import AttentionBackend, AttentionForm
from outdraft.kernels.torch.attention import TorchAttention
from tests.attention.ragged import Batch, Model, Shape, build_batch, layers, shapes, sinks
from tests.kernels.tables import native_attention
from tests.reference.draft_trees import ancestor_masks

CLOSE = {torch.float32: 1e-5, torch.float64: 1e-6}  # Gemma's softmax is float32 always
BACKENDS = [
    pytest.param(TorchAttention(), torch.float64, id="reference-float64"),
    pytest.param(TorchAttention(in_order=True), torch.float64, id="in-order-float64"),
    pytest.param(TorchAttention(), torch.float32, id="reference-float32"),
    pytest.param(native_attention(), torch.float32, id="native-float32"),
]


def mask_of_last(form: AttentionForm, num_keys: int) -> Tensor:
    """bool [K]: what the last token of a text sees, as transformers says."""
    masks = [causal_mask_function]
    if form.window is not None:
        masks.append(sliding_window_overlay(form.window))
    if form.chunk is not None:
        masks.append(chunked_overlay(form.chunk, torch.zeros(1, dtype=torch.long)))
    last, key_K = torch.tensor(num_keys - 1), torch.arange(num_keys)
    return and_masks(*masks)(0, 0, last, key_K).expand(num_keys)


def eager(q_HC: Tensor, k_KGC: Tensor, v_KGE: Tensor, form: AttentionForm) -> Tensor:
    """[H, E]: what the last token of a text reads in GPT-OSS, if there are sinks, or in Gemma 2."""
    module = SimpleNamespace(
        num_key_value_groups=len(q_HC) // k_KGC.shape[1], training=False, sinks=form.sinks_H
    )
    is_hidden_11K = ~mask_of_last(form, len(k_KGC))[None, None]
    mask_11K = q_HC.new_zeros(is_hidden_11K.shape).masked_fill(is_hidden_11K, -torch.inf)
    texts = q_HC[None, :, None], k_KGC.transpose(0, 1)[None], v_KGE.transpose(0, 1)[None], mask_11K
    if form.sinks_H is None:
        out, _ = modeling_gemma2.eager_attention_forward(
            module, *texts, scaling=form.scale, softcap=form.soft_cap
        )
    else:
        module.sinks = form.sinks_H.to(q_HC.dtype)
        out, _ = modeling_gpt_oss.eager_attention_forward(module, *texts, scaling=form.scale)
    return out[0, 0]


def each_row_as_text(batch: Batch, requests: list[Shape], form: AttentionForm) -> Tensor:
    """[T, H, E]."""
    rows: list[Tensor] = []
    for b, shape in enumerate(requests):
        masks = ancestor_masks(shape.parents)
        texts = [range(shape.context_len + row + 1) for row in range(shape.num_causal)]
        for draft in shape.drafted_rows:
            path = [j for j in range(len(shape.parents)) if masks[draft] >> j & 1]
            texts.append([*range(shape.first_draft), *(shape.first_draft + j for j in path)])
        start = int(batch.metadata.query_start_B1[b])
        for row, text in enumerate(texts):
            keys = torch.tensor(list(text))
            k_KGC, v_KGE = batch.k_by_request[b][keys], batch.v_by_request[b][keys]
            rows.append(eager(batch.q_THC[start + row], k_KGC, v_KGE, form))
    return torch.stack(rows)


def check(
    attention: AttentionBackend,
    dtype: torch.dtype,
    requests: list[Shape],
    model: Model,
    form: AttentionForm,
) -> None:
    batch = build_batch(requests, model, dtype, seed=3)
    got = attention.attend(batch.q_THC, batch.cache, batch.metadata, form)
    want = each_row_as_text(batch, requests, form)
    torch.testing.assert_close(got, want, rtol=CLOSE[dtype], atol=CLOSE[dtype])


MIXED = [
    Shape(21, 3, (0, 0, 1, 2, 2, 5)),  # a chunk of a text and a tree
    Shape(0, 40, ()),  # a prompt
    Shape(33, 1, ()),  # decoding
    Shape(30, 1, tuple(range(9))),  # a chain
    Shape(30, 0, (0, 0, 1, 1, 2), (4, 2)),  # a level of a tree
]
SINKS = sinks(Model(4, 2, 24, 4), seed=1)
FORMS = {
    "full": AttentionForm(0.2),
    "sliding window": AttentionForm(0.2, window=8),
    "chunks": AttentionForm(0.2, chunk=8),
    "Gemma 2": AttentionForm(0.4, window=30, soft_cap=1.5),
    "Gemma 2, full layers": AttentionForm(0.4, soft_cap=50.0),
    "GPT-OSS": AttentionForm(0.2, window=16, sinks_H=SINKS),
    "GPT-OSS, full layers": AttentionForm(0.2, sinks_H=SINKS),
    "chunks and sinks": AttentionForm(0.2, chunk=5, sinks_H=SINKS),
}


@pytest.mark.parametrize(("attention", "dtype"), BACKENDS)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("sizes", [(24, None), (24, 16), (8, 20)])
def test_a_form_is_what_the_models_that_have_it_compute(attention, dtype, name, sizes):
    check(attention, dtype, MIXED, Model(4, 2, sizes[0], 4, sizes[1]), FORMS[name])


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "dtype"), BACKENDS)
@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(shapes(max_context=60, max_causal=9, max_drafts=20), min_size=1, max_size=3),
    layer=layers().filter(lambda layer: layer[1].soft_cap is None or layer[1].sinks_H is None),
)
def test_drawn_forms_are_what_the_models_that_have_them_compute(attention, dtype, requests, layer):
    check(attention, dtype, requests, *layer)


@pytest.mark.parametrize(("attention", "dtype"), BACKENDS)
def test_a_sink_far_above_all_scores_silences_a_head_and_one_far_below_does_nothing(
    attention, dtype
):
    batch = build_batch(MIXED, Model(2, 1, 8, 4), dtype, seed=3)
    arguments = batch.q_THC, batch.cache, batch.metadata
    got = attention.attend(*arguments, AttentionForm(0.3, sinks_H=torch.tensor([1e4, -1e4])))
    plain = attention.attend(*arguments, AttentionForm(0.3))
    assert not got[:, 0].any()
    torch.testing.assert_close(got[:, 1], plain[:, 1])


@pytest.mark.parametrize("name", ["window", "chunk", "soft_cap"])
def test_limits_that_are_not_positive_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} of attention must be positive"):
        AttentionForm(1.0, **{name: 0})
