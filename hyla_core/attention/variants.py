"""The table of attention variants: how scores are normalised × which value network they configure.

Each name is a function of `normalize.py` or `values.py`. They are named, not imported, so that a sweep can be checked
without importing jax.

Reference: arXiv 2406.05816, Section 2 (attention as a hypernetwork, HYLA).
"""

from typing import NamedTuple

PAIRWISE = ("unnormalized", "rms_over_heads")
"""Normalisations that look at one pair of query and key at a time, and so allow to compute attention in blocks."""


class Variant(NamedTuple):
    """One attention variant."""

    normalize: str  # a function of normalize.py
    values: str  # a function of values.py
    num_hidden: int = (
        0  # sums over heads that make the hidden layer of the value network; 0: it has none, 2: it is gated
    )

    @property
    def num_values(self) -> int:
        """Vectors of v_head_dim entries that a head projects for each key: one for each sum, and at least one."""
        return max(1, self.num_hidden)

    @property
    def is_pairwise(self) -> bool:
        """Whether the weights of a pair of query and key follow from its own scores, whatever the other keys' are."""
        return self.normalize in PAIRWISE


VARIANTS: dict[str, Variant] = {
    "softmax": Variant("softmax_over_keys", "default_values"),
    "linear": Variant("unnormalized", "default_values"),
    "linear_rms": Variant("rms_over_heads", "default_values"),
    "hyla": Variant("rms_over_heads", "relu_values", num_hidden=1),
    "hyla_no_rms": Variant("unnormalized", "relu_values", num_hidden=1),
    "hyla_linear": Variant("rms_over_heads", "linear_values", num_hidden=1),
    "hyla_linear_no_rms": Variant("unnormalized", "linear_values", num_hidden=1),
    "hyla_softmax": Variant("softmax_over_keys", "relu_values", num_hidden=1),
    "hyla_gated": Variant("rms_over_heads", "gated_values", num_hidden=2),
}
"""What each row is:

softmax: multi-head softmax attention.
linear: multi-head linear attention: the scores themselves are the weights.
linear_rms: the same, with weights that are scaled to a root mean square of one over the heads.
hyla: the paper's Hypernetwork Linear Attention: linear_rms with a relu in the value network.
hyla_no_rms: hyla without the scaling over heads.
hyla_linear: hyla without the relu: a deep but linear value network.
hyla_linear_no_rms: hyla without either.
hyla_softmax: softmax over keys with HYLA's value network.
hyla_gated: hyla with a gated (SwiGLU) hidden layer, from two projections of values. The official code names it, but
  cannot run it.

A new row is one function and one line here; counts, layers and tests follow from the table.
"""
