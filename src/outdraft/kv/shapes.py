"""What one layer keeps of each token; known before anything is allocated."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerCacheShape:
    """One layer's kv heads, and the numbers of each head's key and of its value."""

    num_kv_heads: int
    key_size: int
    value_size: int
