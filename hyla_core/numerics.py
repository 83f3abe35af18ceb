"""Products whose factors may be rounded and whose sums never are.

With activations in bfloat16, processors multiply pairs of bfloat16 exactly and can add up the results in float32. Every
product of the model asks for that, forward and backward: bfloat16 has 8 significant bits, so a sum kept in it stops
growing after some 256 terms of equal size. With float32 throughout, these are the ordinary products of JAX.
"""

import functools
import math
import string
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

BFLOAT16_LOSS_ATOL = 0.04
"""How far the loss that a training reaches in bfloat16 may be from that in float32: nats, as a mean over three seeds.

Measured on a CPU with SRAVEN of one feature with four values, two layers of width 32 and 900 steps of 64 examples, in
which the loss falls from 1.39 to about 0.4. Training loss over the last 150 steps, mean over three seeds, float32 and
bfloat16: softmax 0.344 and 0.350, linear 0.438 and 0.443, hyla 0.440 and 0.417, hyla_gated 0.422 and 0.409; after 1500
steps, hyla 0.303 and 0.302, hyla_gated 0.284 and 0.280. Single seeds of these differ by up to 0.05 in either direction,
as after any change of rounding: the steep part of a curve comes a little earlier or later.
"""


def product(spec: str, left: Array, right: Array) -> Array:
    """`jnp.einsum` of two factors, rounded to the narrower of their two types, with sums in float32.

    The gradients are such products too: the incoming one is rounded to the narrower type, the outgoing ones have the
    types of their factors. So the gradient of a float32 parameter is never rounded.

    Args:
      spec: as for einsum, with spelt-out axes; each is in two of left, right and result, or in all three.
      left: float32 or bfloat16.
      right: float32 or bfloat16.

    Returns:
      The product, float32.
    """
    if left.dtype == right.dtype == jnp.float32:
        return jnp.einsum(spec, left, right)
    return _rounded_product(spec, (left.dtype, right.dtype), left, right)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounded_product(spec: str, dtypes: tuple[Any, Any], left: Array, right: Array) -> Array:
    narrow = _narrower(dtypes)
    return _summed(spec, _rounded(left, narrow), _rounded(right, narrow))


def _narrower(dtypes: tuple[Any, Any]) -> Any:
    return min(dtypes, key=lambda dtype: jnp.finfo(dtype).bits)


def _summed(spec: str, left: Array, right: Array) -> Array:
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)


def _forward(spec: str, dtypes: tuple[Any, Any], left: Any, right: Any) -> tuple[Array, tuple[Array | None, ...]]:
    """Also keeps each factor that the gradient of the other is made of, if anybody asks for that."""
    narrow = _narrower(dtypes)
    factors = _rounded(left.value, narrow), _rounded(right.value, narrow)
    return _summed(spec, *factors), (factors[0] if right.perturbed else None, factors[1] if left.perturbed else None)


def _backward(
    spec: str, dtypes: tuple[Any, Any], kept: tuple[Array | None, ...], grad: Any
) -> tuple[Array | None, Array | None]:
    # Left to JAX, these would be products of a float32 and a bfloat16 factor, which processors do not have: both would
    # be made float32 first, at several times the cost.
    if isinstance(grad, SymbolicZero):
        return None, None
    left, right = kept
    left_axes, right_axes, result_axes = spec.replace("->", ",").split(",")
    grad = _rounded(grad, _narrower(dtypes))
    left_grad = None if right is None else _summed(f"{result_axes},{right_axes}->{left_axes}", grad, right)
    right_grad = None if left is None else _summed(f"{left_axes},{result_axes}->{right_axes}", left, grad)
    return (
        None if left_grad is None else left_grad.astype(dtypes[0]),
        None if right_grad is None else right_grad.astype(dtypes[1]),
    )


_rounded_product.defvjp(_forward, _backward, symbolic_zeros=True)


def _rounded(factor: Array, dtype: Any) -> Array:
    if jax.default_backend() != "cpu":
        return factor.astype(dtype)
    # Most cores lack bfloat16, and XLA's CPU compiler fails on some products of it ("Unsupported element type for
    # DotThunk"). There, numbers are rounded alike and stay float32, so that products and sums are the same.
    info = jnp.finfo(dtype)
    return lax.reduce_precision(factor.astype(jnp.float32), exponent_bits=info.nexp, mantissa_bits=info.nmant)


def dot_general(left: Array, right: Array, dimension_numbers: lax.DotDimensionNumbers, precision: Any = None) -> Array:
    """`jax.lax.dot_general` as `product` does it.

    Args:
      left: float32 or bfloat16.
      right: float32 or bfloat16.
      dimension_numbers: contracted axes of left and right, then batch axes; as for lax.dot_general.
      precision: as for lax.dot_general; of no account where factors are bfloat16, whose products are exact.

    Returns:
      The product, float32: batch axes, then the other axes of left, then those of right.
    """
    if left.dtype == right.dtype == jnp.float32:
        return lax.dot_general(left, right, dimension_numbers, precision=precision)
    (left_summed, right_summed), (left_batch, right_batch) = dimension_numbers
    names = iter(string.ascii_letters)
    left_axes = [next(names) for _ in range(left.ndim)]
    right_axes = [next(names) for _ in range(right.ndim)]
    for axis, twin in zip((*left_summed, *left_batch), (*right_summed, *right_batch), strict=True):
        right_axes[twin] = left_axes[axis]
    batch = [left_axes[axis] for axis in left_batch]
    summed = [left_axes[axis] for axis in left_summed]
    free = [name for name in left_axes + right_axes if name not in batch and name not in summed]
    return product(f"{''.join(left_axes)},{''.join(right_axes)}->{''.join(batch + free)}", left, right)


class Dense(nn.Module):
    """A dense layer that sums in float32, bias included, and rounds the result to its dtype, once.

    Attributes:
      features: the widths of the output's last axes.
      num_summed: how many of the input's last axes are summed over.
      use_bias: whether a bias is added.
      dtype: of the output, and what the product's factors are rounded to. Parameters are float32, named and drawn as
        those of flax's DenseGeneral.
    """

    features: tuple[int, ...]
    num_summed: int = 1
    use_bias: bool = True
    dtype: str = "float32"

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """[…, *summed axes] to […, *features]."""
        kept = inputs.ndim - self.num_summed
        kernel = self.param("kernel", _draw_kernel, inputs.shape[kept:], self.features)
        axes = tuple(range(kept, inputs.ndim)), tuple(range(self.num_summed))
        outputs = dot_general(inputs.astype(self.dtype), kernel, (axes, ((), ())))
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros_init(), self.features)
            outputs = outputs + jnp.reshape(bias, (1,) * kept + self.features)
        return outputs.astype(self.dtype)


def _draw_kernel(rng: Array, summed: tuple[int, ...], features: tuple[int, ...]) -> Array:
    """[*summed, *features], of mean 0 and variance 1 / (number of terms of a sum)."""
    flat = nn.initializers.lecun_normal()(rng, (math.prod(summed), math.prod(features)), jnp.float32)
    return jnp.reshape(flat, summed + features)
