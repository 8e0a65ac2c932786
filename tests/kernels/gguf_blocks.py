"""Random blocks of GGUF files."""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.block_weight import BlockRows

# Where halves stand in a block of a file: scales, then what is added.
HALVES = {
    WeightFormat.Q4_0: (0,),
    WeightFormat.Q4_1: (0, 2),
    WeightFormat.Q5_0: (0,),
    WeightFormat.Q5_1: (0, 2),
    WeightFormat.Q8_0: (0,),
    WeightFormat.Q2_K: (80, 82),
    WeightFormat.Q3_K: (108,),
    WeightFormat.Q4_K: (0, 2),
    WeightFormat.Q5_K: (0, 2),
    WeightFormat.Q6_K: (208,),
    WeightFormat.IQ4_NL: (0,),
    WeightFormat.IQ4_XS: (0,),
}


def random_rows(
    format: WeightFormat, num_outputs: int, num_inputs: int, seed: int = 0, size: float = 0.01
) -> BlockRows:
    """All codes and inner scales that there are, and halves of about that size."""
    rng = np.random.default_rng(seed)
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[format.upper()]]
    shape = num_outputs, num_inputs // block, block_bytes
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    for first in HALVES[format]:
        halves = rng.normal(0, size, (*shape[:2], 1)).astype(np.float16)
        blocks[..., first : first + 2] = halves.view(np.uint8)
    return BlockRows(format, num_inputs, blocks.reshape(num_outputs, -1))
