"""What a layer asks of the keys in its cache, outside of whole passes.

Dimension key: R rows, D hidden, H heads, C head size.
"""

from torch import Tensor

from outdraft.kernels.reference.pointwise import rotate
from outdraft.models.decoder import Decoder


def layer_queries(decoder: Decoder, layer: int, residual_RD: Tensor, positions_R: Tensor) -> Tensor:
    """[R, H, C] of the residual stream's dtype: the queries of rows, as they meet the keys.

    Args:
        layer: from 0 on.
        residual_RD: the stream that enters the layer.
        positions_R: int64; of the rows in their texts.
    """
    part, num_heads = decoder.decoder_layers[layer], decoder.config.num_heads
    x_RD = residual_RD if part.input_norm is None else part.input_norm(residual_RD)
    q_RHC = part.qkv_proj(x_RD).unflatten(-1, (-1, part.head_size))[:, :num_heads]
    if part.q_norm is not None:
        q_RHC = part.q_norm(q_RHC)
    return rotate(q_RHC, decoder.rotary.cos_sin_MC.index_select(0, positions_R))
