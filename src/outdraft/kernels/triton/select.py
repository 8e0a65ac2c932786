"""What Triton computes on a GPU, if it is there."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from outdraft.kernels.ops import Kernels


def with_triton(others: Kernels, *, has_graphs: bool) -> Kernels:
    """The table of a GPU; as it is without triton, an extra.

    Args:
        has_graphs: passes of few rows become CUDA graphs.
    """
    if find_spec("triton") is None:
        return others
    from outdraft.kernels.triton.attention import TritonAttention
    from outdraft.kernels.triton.decoder import TritonDecoder
    from outdraft.kernels.triton.noise import gumbel

    return replace(
        others,
        name=f"triton, {others.name}",
        attention=TritonAttention(),
        gumbel=gumbel,
        compile_decoder=partial(TritonDecoder, has_graphs=has_graphs),
    )
