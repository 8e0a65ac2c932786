"""The table whose entries are all readable."""

from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch import noise, pointwise, rows, sampling, verification
from outdraft.kernels.torch.attention import TorchAttention, block_mass
from outdraft.kernels.torch.decoder import TorchDecoder
from outdraft.kernels.torch.drawn_level import draw_level, grow
from outdraft.kernels.torch.experts import TorchExperts
from outdraft.kernels.torch.linear import PlainProduct, pack_codes
from outdraft.kernels.torch.texts import ReferenceNgramTexts, ReferenceSuffixTexts


def reference_kernels(*, in_order: bool = False) -> Kernels:
    """For any device and dtype.

    Args:
        in_order: a row's results do not depend on the rows beside it; slower.
    """
    return Kernels(
        name="reference",
        has_threads=False,
        attention=TorchAttention(in_order=in_order),
        place_rows=rows.place_rows,
        place_level=rows.place_level,
        draw_level=draw_level,
        grow=grow,
        scale_to_rms=pointwise.scale_to_rms,
        copy_rows=rows.copy_rows,
        block_mass=block_mass,
        pack_linear=PlainProduct,
        pack_codes=pack_codes,
        pack_experts=TorchExperts,
        ngram_texts=ReferenceNgramTexts,
        suffix_texts=ReferenceSuffixTexts,
        gumbel=noise.gumbel,
        mask_forbidden=sampling.mask_forbidden,
        finite_rows=sampling.finite_rows,
        penalize=sampling.penalize,
        scale_and_cut=sampling.scale_and_cut,
        score_tokens=sampling.score_tokens,
        match=verification.match,
        verify=verification.verify,
        compile_decoder=TorchDecoder,
    )
