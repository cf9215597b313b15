"""Operands in 8 bits: from numbers to values and scales, and back.

The names are those of the field: `qvalue` and `scale` are qwix's, where `x = qvalue * scale`;
TransformerEngine calls that scale `scale_inv`, and DeepSeek-V3 `s`. To scale by the numbers at hand,
not by those of earlier steps, is TransformerEngine's "current scaling".
"""  # noqa: E501

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stretto.kernels.problem import checks
from stretto.kernels.problem.numpy_arrays import takes_numpy_arrays
from stretto.kernels.problem.promotion import by_default_rules
from stretto.kernels.problem.scales import BLOCK, FP8

OP = "quantise"
GRANULARITIES = ("tensor", "row", "block")


class Quantised(NamedTuple):
    """Values in 8 bits and their scales in float32: `x = qvalue * scale`."""

    qvalue: jax.Array
    scale: jax.Array


@takes_numpy_arrays
@by_default_rules
def quantise(
    x: jax.Array,
    granularity: Literal["tensor", "row", "block"] = "row",
    dtype: jax.typing.DTypeLike = jnp.float8_e4m3fn,
    *,
    axis: int = -1,
    block_scaling_dim: Literal[1, 2] = 1,
    force_pow_2_scales: bool = False,
) -> Quantised:
    """`x` as values in 8 bits and scales, by the largest magnitude: current scaling.

    `scale = amax(|x|) / finfo(dtype).max` and `qvalue = x / scale`: of float8_e4m3fn the divisor is
    448, of float8_e5m2 57344. `axis` is the contraction of the product that x is an operand of. Of
    x `[..., r, k]` with `axis=-1`, or `[..., k, r]` with `axis=-2`:

    | granularity | one scale for | scale, `axis=-1` | scale, `axis=-2` |
    |---|---|---|---|
    | "tensor" | all of x | `[]` | `[]` |
    | "row" | all along the contraction | `[..., r, 1]` | `[..., 1, r]` |
    | "block" | 128 along the contraction | `[..., r, k / 128]` | `[..., k / 128, r]` |
    | "block", `block_scaling_dim=2` | 128 x 128 | `[..., r / 128, k / 128]` | `[..., k / 128, r / 128]` |

    Numbers of blocks are rounded up. These are the shapes that `lhs_scale=` and `rhs_scale=` of the
    operations take; as DeepSeek-V3 has it, blocks are of 1 x 128 for activations and gradients and
    of 128 x 128 for weights. It is plain JAX, which XLA fuses: one pass that reads x for amax, and
    one that reads x and writes the values. Inside `jax.shard_map` each device scales by its own numbers.

    What shares a scale and is all zeros has scale 1. Where it holds an infinity or a NaN, its scale
    and with it all that it stands for is NaN, so that none is lost. A scale is no less than float32's
    least normal number. The values are rounded whoever reads them (`as_rounded`). For training see
    `stretto.fp8`: rounding to 8 bits has no derivative of use.

    Args:
      x: floating-point, two dimensions or more (one is enough for "tensor").
      granularity: see above.
      dtype: float8_e4m3fn or float8_e5m2.
      axis: of x, the contraction: one of the last two.
      block_scaling_dim: 1 for blocks of 1 x 128, 2 for blocks of 128 x 128.
      force_pow_2_scales: scales are rounded up to powers of two, which multiply without an error.

    Returns:
      `(qvalue, scale)`: in `dtype` and in x's shape, and in float32.

    Raises:
      ValueError: an unknown granularity, type or number of dimensions, or an axis out of range.
    """  # noqa: E501
    axis = _checked(x, granularity, dtype, axis, block_scaling_dim)
    checks.check_flag(OP, "force_pow_2_scales", force_pow_2_scales)
    wide = x.astype(jnp.float32)
    if granularity == "tensor":
        amax = _amax(wide, tuple(range(x.ndim)))
    elif granularity == "row":
        amax = jnp.expand_dims(_amax(wide, (axis,)), axis)
    else:
        sizes = [1] * x.ndim  # Elements of each dimension that share a scale.
        sizes[axis] = BLOCK
        if block_scaling_dim == 2:
            sizes[_other(axis, x.ndim)] = BLOCK
        amax = _amax_of_blocks(wide, sizes)
    scale = _scale(amax, dtype, force_pow_2_scales)
    values = (wide / spread(scale, x.shape)).astype(dtype)
    return Quantised(as_rounded(values), scale)


def as_rounded(values: jax.Array) -> jax.Array:
    """`values` in 8 bits, before they are made wider.

    Where XLA for GPUs sees a number made narrow and wide again in one program, it leaves out both
    (`xla_allow_excess_precision`, true by default), and with them the rounding. The barrier keeps it. It
    costs no pass over memory: XLA removes it after fusing, and layouts pass through it.
    """  # noqa: E501
    return lax.optimization_barrier(values)


def dequantise(
    qvalue: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """`qvalue * scale`, computed in float32, in `dtype`; of scales as `quantise` makes them."""
    wide = as_rounded(qvalue).astype(jnp.float32)
    return (wide * spread(scale, qvalue.shape)).astype(dtype)


def spread(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A scale that broadcasts to `shape`: along blocks, each as often as its block is long."""
    for axis in range(-scale.ndim, 0):
        size, count = shape[axis], scale.shape[axis]
        if count not in (1, size):
            repeated = jnp.repeat(scale, BLOCK, axis)
            scale = lax.slice_in_dim(repeated, 0, size, axis=axis)
    return scale


def _checked(
    x: jax.Array, granularity: str, dtype: jax.typing.DTypeLike, axis: int, block_scaling_dim: int
) -> int:
    """`axis`, made non-negative; ValueError for what cannot be quantised so."""
    checks.check_array(OP, "x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{OP}: x is {x.dtype}; it must be floating-point. Cast it.")
    if granularity not in GRANULARITIES:
        known = ", ".join(map(repr, GRANULARITIES))
        raise ValueError(f"{OP}: granularity={granularity!r} is not one of {known}.")
    if _name_of(dtype) not in FP8:
        raise ValueError(f"{OP}: dtype={dtype} must be {' or '.join(FP8)}.")
    if block_scaling_dim not in (1, 2):
        raise ValueError(
            f"{OP}: block_scaling_dim={block_scaling_dim} must be 1, for blocks of 1 x {BLOCK}, or"
            f" 2, for blocks of {BLOCK} x {BLOCK}."
        )
    if granularity == "tensor":
        return 0
    if x.ndim < 2:
        raise ValueError(
            f"{OP}: x has shape {x.shape}; {granularity!r} needs two dimensions or more. Reshape"
            " it, or pass granularity='tensor'."
        )
    found = checks.check_array_axis(OP, "axis", axis, x)
    if found < x.ndim - 2:
        raise ValueError(
            f"{OP}: axis={axis} of x {x.shape} must be one of the last two dimensions, -1 or -2."
        )
    return found


def _name_of(dtype: jax.typing.DTypeLike) -> str | None:
    """Of a type; None of what is none, such as "e4m3"."""
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return None


def _other(axis: int, ndim: int) -> int:
    """The other one of the last two dimensions."""
    return 2 * ndim - 3 - axis


def _amax(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The largest magnitude along `axes` of float32 numbers; NaN where one of them is NaN.

    As integers magnitudes have the same order, and NaN comes last. The maximum of floats loses NaN
    on CPUs (XLA's `xla_cpu_enable_fast_min_max`).
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)
    return lax.bitcast_convert_type(jnp.max(bits, axis=axes, initial=0), jnp.float32)


def _amax_of_blocks(x: jax.Array, sizes: list[int]) -> jax.Array:
    """The same of each block of so many elements a dimension; the last ones may be smaller."""
    missing = [-(-n // size) * size - n for n, size in zip(x.shape, sizes, strict=True)]
    if any(missing):
        x = jnp.pad(x, [(0, more) for more in missing])
    pairs = [(n // size, size) for n, size in zip(x.shape, sizes, strict=True)]
    cut = x.reshape([size for pair in pairs for size in pair])
    return _amax(cut, tuple(range(1, cut.ndim, 2)))


def _scale(amax: jax.Array, dtype: jax.typing.DTypeLike, force_pow_2_scales: bool) -> jax.Array:
    """The scale of what has such a largest magnitude."""
    scale = jnp.maximum(amax / float(jnp.finfo(dtype).max), jnp.finfo(jnp.float32).tiny)
    if force_pow_2_scales:
        fraction, exponent = jnp.frexp(scale)  # The fraction is at least a half, and below 1.
        scale = jnp.ldexp(jnp.float32(1), exponent - (fraction == 0.5))
    scale = jnp.where(amax == 0, jnp.float32(1), scale)
    return jnp.where(jnp.isfinite(amax), scale, jnp.float32(jnp.nan))
