"""The table of attention variants: how scores are normalised × which value network they configure.

Each name is a function of `normalize.py` or `values.py`. They are named, not imported, so that a sweep can be checked
without importing jax.

Reference: arXiv 2406.05816, Section 2 (attention as a hypernetwork, HYLA).
"""

from typing import NamedTuple


class Variant(NamedTuple):
    """One attention variant."""

    normalize: str  # a function of normalize.py
    values: str  # a function of values.py


VARIANTS: dict[str, Variant] = {
    "softmax": Variant("softmax_over_keys", "default_values"),
    "linear": Variant("unnormalized", "default_values"),
    "linear_rms": Variant("rms_over_heads", "default_values"),
    "hyla": Variant("rms_over_heads", "relu_values"),
    "hyla_no_rms": Variant("unnormalized", "relu_values"),
    "hyla_linear": Variant("rms_over_heads", "linear_values"),
    "hyla_linear_no_rms": Variant("unnormalized", "linear_values"),
    "hyla_softmax": Variant("softmax_over_keys", "relu_values"),
}
