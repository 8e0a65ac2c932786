"""The table of the compiled library."""

from dataclasses import replace
from functools import partial

from outdraft.kernels.native.attention import NativeAttention
from outdraft.kernels.native.decoder import compile_decoder
from outdraft.kernels.native.drafting import NativeDrafting
from outdraft.kernels.native.library import Library, shared_team
from outdraft.kernels.native.linear import NativeExperts, NativeLinear
from outdraft.kernels.native.sampling import NativeSampling
from outdraft.kernels.native.step import NativeRows
from outdraft.kernels.native.texts import NativeSuffixTexts, ngram_texts
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch.table import reference_kernels


def native_host_kernels(library: Library, others: Kernels, *, is_cpu: bool) -> Kernels:
    """Replace the operations that the host computes for models of any dtype.

    Args:
        is_cpu: the models' tensors are on the host too.
    """
    rows = NativeRows(library)
    kernels = replace(
        others,
        place_rows=rows.place_rows,
        ngram_texts=partial(ngram_texts, library),
        suffix_texts=partial(NativeSuffixTexts, library),
    )
    if is_cpu:
        place_level = NativeDrafting(library).place_level
        kernels = replace(kernels, place_level=place_level, copy_rows=rows.copy_rows)
    return kernels


def native_kernels(library: Library, num_threads: int, *, meets_bytes: bool = False) -> Kernels:
    """For float32 and bfloat16 models on the CPU; `num_threads` compute, the caller included.

    Args:
        meets_bytes: rows that meet weights in blocks become integers of 8 bits, else of 16.
    """
    kernels = native_host_kernels(library, reference_kernels(in_order=True), is_cpu=True)
    team = shared_team(library, num_threads)
    attention, linear = NativeAttention(team), NativeLinear(team, meets_bytes=meets_bytes)
    sampling, drafting = NativeSampling(team), NativeDrafting(library)
    return replace(
        kernels,
        name=library.name,
        has_threads=num_threads > 1,
        gumbel=sampling.gumbel,
        mask_forbidden=sampling.mask_forbidden,
        finite_rows=sampling.finite_rows,
        penalize=sampling.penalize,
        scale_and_cut=sampling.scale_and_cut,
        score_tokens=sampling.score_tokens,
        match=sampling.match,
        verify=sampling.verify,
        attention=attention,
        block_mass=attention.block_mass,
        pack_linear=linear.pack_linear,
        pack_codes=linear.pack_codes,
        pack_experts=partial(NativeExperts, linear),
        compile_decoder=partial(compile_decoder, team),
        draw_level=drafting.draw_level,
        grow=drafting.grow,
        scale_to_rms=linear.scale_to_rms,
    )
