"""What is computed at once: all pairs of query and key or blocks of them, a whole batch or pieces. Needs no jax."""

from typing import NamedTuple

from hyla_core.attention.variants import Variant
from hyla_core.config import TrainConfig

CACHE_BYTES = 2**20
"""Attention weights that a piece of a batch may have on a CPU.

Measured on cores with 2 MiB of cache each: SRAVEN of 83 kB per example took least time with 8 to 16 examples a piece.
"""

PIECES_AT_ONCE = 2
"""Pieces of a batch that are computed side by side, so that cores share them."""

USE_KERNEL = False
"""Whether blocks are computed by the kernels of `blockwise_pallas.py`, on GPUs and where no mask is given. To be set
before anything is compiled. Off, as these kernels have never run on a GPU; `benchmarks/blockwise.py` sets it."""


class Blocks(NamedTuple):
    """Sizes of a block of pairs, or numbers of something of each of its sides."""

    queries: int
    keys: int


def min_seq_len(variant: Variant, backend: str) -> int:
    """The shortest sequence that passes in blocks; of no account for variants that cannot.

    On CPUs, from where on blocks were faster: with a hidden layer a step took half to three quarters of the time at 128
    positions, without one as long at 256 (`benchmarks/blockwise.py` with one layer of 8 heads of 16 and of 64). Other
    backends compute many pairs at once and were not measured. There it is the memory that decides: at 1,024 positions a
    hidden layer of width 64 takes 256 MiB per example and layer.

    Args:
      variant: of attention.
      backend: `cpu`, `gpu` or `tpu`, as JAX names them.
    """
    if backend != "cpu":
        return 1024
    return 128 if variant.num_hidden else 256


def blocks(variant: Variant, seq_len: int, backend: str) -> Blocks | None:
    """The blocks in which attention is computed, or None where all pairs are computed at once.

    Short sequences are one block, longer ones blocks of equal size: of up to 64 positions, with which a block's hidden
    layer stays in a core's cache, or on other backends up to 128, as fewer steps follow each other.

    Args:
      variant: only those whose weights look at one pair at a time are computed in blocks.
      seq_len: number of positions.
      backend: as for `min_seq_len`.
    """
    if not variant.is_pairwise or seq_len < min_seq_len(variant, backend):
        return None
    largest = 64 if backend == "cpu" and seq_len > 128 else 128
    size = -(-seq_len // -(-seq_len // largest))
    return Blocks(size, size)


def pieces(config: TrainConfig, backend: str) -> int:
    """Into how many pieces of equal size a training's batches are cut (microbatch.py).

    Args:
      config: the training.
      backend: as for `min_seq_len`.

    Returns:
      A divisor of the batch size; 1 on accelerators, and where masks of dropout differ between examples.
    """
    c, size = config.model, config.optim.batch_size
    if backend != "cpu" or c.dropout:
        return 1
    example_bytes = 4 * c.num_heads * config.task.seq_len**2
    largest = max(1, CACHE_BYTES // example_bytes)
    return next(number for number in range(1, size + 1) if not size % number and size // number <= largest)


def takes_fused(variant: Variant, head_dims: tuple[int, int], dtype: str, backend: str) -> bool:
    """Whether attention that adds no position bias, masks nothing but the future and drops no pairs now is computed by
    the library's fused kernel (attention/fused.py).

    Args:
      variant: softmax over keys with the default values alone.
      head_dims: entries of a head's query and of its value; cuDNN takes equal ones, multiples of 8 up to 128.
      dtype: of activations. float32 stays float32: the kernel knows 16 bits only.
      backend: as for `min_seq_len`.
    """
    size, value_size = head_dims
    return (
        backend == "gpu"
        and dtype == "bfloat16"
        and variant.normalize == "softmax_over_keys"
        and variant.values == "default_values"
        and size == value_size
        and size % 8 == 0
        and size <= 128
    )


def takes_kernel(backend: str, has_mask: bool) -> bool:
    """Whether what is computed in blocks is computed by a kernel."""
    return USE_KERNEL and backend == "gpu" and not has_mask
