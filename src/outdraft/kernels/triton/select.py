"""Attention on a GPU, if there is a kernel for it."""

from importlib.util import find_spec

from outdraft.attention.base import AttentionBackend


def triton_attention() -> AttentionBackend | None:
    """A new backend; None: triton, an extra, is not installed."""
    if find_spec("triton") is None:
        return None
    from outdraft.kernels.triton.attention import TritonAttention

    return TritonAttention()
