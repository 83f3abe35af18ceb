"""How attention is computed: from all pairs of query and key at once, or in blocks. Needs no jax."""

from typing import NamedTuple

from hyla_core.attention.variants import Variant

MIN_SEQ_LEN = 256


class Blocks(NamedTuple):
    """Sizes of a block of pairs, or numbers of something of each of its sides."""

    queries: int
    keys: int


def blocks(variant: Variant, seq_len: int, backend: str) -> Blocks | None:
    """The blocks in which attention is computed, or None where all pairs are computed at once.

    Args:
      variant: only those whose weights look at one pair at a time are computed in blocks.
      seq_len: number of positions.
      backend: `cpu`, `gpu` or `tpu`, as JAX names them.
    """
    if not variant.is_pairwise or seq_len < MIN_SEQ_LEN:
        return None
    return Blocks(64, 64)
