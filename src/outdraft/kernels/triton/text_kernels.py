# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN201
# Triton infers the types of these functions and specialises on them.
"""What is written to the texts behind a step."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["row_len", "width"],
    do_not_specialize_on_alignment=["rows", "starts", "token_ids"],
)
def append_ids(
    texts,  # int64 [S, row_len]
    rows,
    starts,
    token_ids,  # int64 [B, N]
    row_len,
    width,  # N
    WIDTH: tl.constexpr,  # at least N
):
    """Compute `append_token_ids`. Grid: [B]."""
    request = tl.program_id(0).to(tl.int64)
    place_N = tl.arange(0, WIDTH)
    id_N = tl.load(token_ids + request * width + place_N, mask=place_N < width, other=-1)
    target = texts + tl.load(rows + request) * row_len + tl.load(starts + request)
    tl.store(target + place_N, id_N, mask=id_N >= 0)
