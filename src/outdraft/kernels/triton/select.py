"""What Triton computes on a GPU, if it is there."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from outdraft.kernels.data.graph_sizes import rounded_rows
from outdraft.kernels.ops import Kernels


def with_triton(others: Kernels, *, has_graphs: bool) -> Kernels:
    """The table of a GPU; as it is without triton, an extra.

    Args:
        has_graphs: passes of few rows, drafts that grow and their verification become CUDA graphs.
    """
    if find_spec("triton") is None:
        return others
    from outdraft.kernels.triton import drafting, noise, texts, traversal
    from outdraft.kernels.triton.attention import TritonAttention
    from outdraft.kernels.triton.decoder import TritonDecoder
    from outdraft.kernels.triton.growth import GraphedGrowth
    from outdraft.kernels.triton.verification import GraphedVerification

    kernels = replace(
        others,
        name=f"triton, {others.name}",
        attention=TritonAttention(),
        gumbel=noise.gumbel,
        append_token_ids=texts.append_token_ids,
        place_level=drafting.place_level,
        draw_level=drafting.draw_level,
        match=drafting.match,
        verify=traversal.verify,
        compile_decoder=partial(
            TritonDecoder, has_graphs=has_graphs, first_times=others.first_times
        ),
    )
    if not has_graphs:
        return kernels
    verification = GraphedVerification(kernels)
    return replace(
        kernels,
        grow=GraphedGrowth(kernels.first_times),
        match=verification.match,
        verify=verification.verify,
        num_grown=rounded_rows,
        choose=verification.choose,
    )
