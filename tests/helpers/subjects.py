"""All public operations as subjects of the same checks: what they take, and what is right.

Operands are drawn on the devices, no two of which hold the same, and the right result comes from
`lax` alone, in float32 of full precision. So nothing large comes to the host.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import fused_cases as cases
import jax
import jax.numpy as jnp
from fused_cases import BF16, F32
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.kernels.operations import OPERATIONS

type Sizes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Subject:
    """An operation under test.

    Attributes:
      name: of the operation.
      shapes: (devices of a team, sizes of the whole problem) -> shapes of a device's operands.
      draw: (key of this device, shapes, whole) -> operands; whole numbers, or with `whole` False
        normal ones where the operation rounds.
      call: (operands, axis, **options) -> result; options that it does not have are ignored.
      exact: (operands, axis) -> the result in float32, exact for whole numbers; nothing of ours.
      sizes_of: (devices, m, k, n of a device) -> sizes of the whole problem.
      replicated: whether all devices must hold bitwise the same result.
    """

    name: str
    shapes: Callable[[int, Sizes], list[tuple[int, int]]]
    draw: Callable[..., list[jax.Array]]
    call: Callable[..., jax.Array]
    exact: Callable[..., jax.Array]
    sizes_of: Callable[[int, int, int, int], Sizes]
    replicated: bool


# --- The fused matmuls ----------------------------------------------------------------------------


def blocks(name: str, devices: int, sizes: Sizes) -> list[tuple[int, int]]:
    """Shapes of a device's lhs and rhs, of a whole problem of `sizes` m x k x n."""
    m, k, n = sizes
    if name == "all_gather_matmul_k":
        return [(m, k // devices), (k, n // devices)]
    if name in ("all_gather_matmul", "all_gather_matmul_n"):
        return [(m // devices, k), (k, n // devices)]
    return [(m, k // devices), (k // devices, n)]


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in `dtype`, rounded to it even if it is float32 again next; XLA may leave a cast out."""
    if jnp.issubdtype(dtype, jnp.floating):
        info = jnp.finfo(dtype)
        x = lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    return x.astype(dtype)


def draw(key: jax.Array, shape: tuple[int, int], *, whole: bool | jax.Array, share: int):
    """A matrix in bfloat16: normal numbers, or -1, 0 and 1 of which one in `share` is not 0."""
    bits = jax.random.bits(key, shape, jnp.uint8)
    edge = 128 // share
    numbers = jnp.where(bits < edge, 1, jnp.where(bits >= 256 - edge, -1, 0)).astype(BF16)
    if whole is True:
        return numbers
    normal = rounded(jax.random.normal(key, shape, F32), BF16)
    return lax.select(jnp.broadcast_to(whole, shape), numbers, normal)


def draw_pair(key: jax.Array, shapes: Sequence[tuple[int, int]], *, whole: bool | jax.Array):
    """lhs and rhs. So few whole numbers are not 0 that partial sums stay below 256."""
    return [
        draw(k, shape, whole=whole, share=share)
        for k, shape, share in zip(jax.random.split(key), shapes, (4, 2), strict=True)
    ]


def product(name: str, operands: Sequence[jax.Array], axis: Any) -> jax.Array:
    """The fused matmuls' result in float32, by `lax`."""
    matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    lhs, rhs = (x.astype(F32) for x in operands)
    if name == "all_gather_matmul":
        return matmul(lax.all_gather(lhs, axis, tiled=True), rhs)
    if name == "all_gather_matmul_k":
        return matmul(lax.all_gather(lhs, axis, axis=1, tiled=True), rhs)
    if name == "all_gather_matmul_n":
        return matmul(lhs, lax.all_gather(rhs, axis, axis=1, tiled=True))
    if name == "matmul_reduce_scatter":
        return lax.psum_scatter(matmul(lhs, rhs), axis, tiled=True)
    return lax.psum(matmul(lhs, rhs), axis)


def _fused(name: str) -> Subject:
    def call(operands, axis, **options):
        return cases.FORMS[name](*operands, axis, **options)

    return Subject(
        name=name,
        shapes=functools.partial(blocks, name),
        draw=draw_pair,
        call=call,
        exact=functools.partial(product, name),
        sizes_of=functools.partial(cases.whole, name),
        replicated=name == "matmul_all_reduce",
    )


# --- The collectives ------------------------------------------------------------------------------

COLLECTIVES: dict[str, Callable[..., jax.Array]] = {
    "all_gather": st.all_gather,
    "reduce_scatter": st.reduce_scatter,
    "all_reduce": st.all_reduce,
    "all_to_all": functools.partial(st.all_to_all, split_axis=0, concat_axis=1),
}
PLAIN: dict[str, Callable[..., jax.Array]] = {
    "all_gather": functools.partial(lax.all_gather, tiled=True),
    "reduce_scatter": functools.partial(lax.psum_scatter, tiled=True),
    "all_reduce": lax.psum,
    "all_to_all": functools.partial(lax.all_to_all, split_axis=0, concat_axis=1, tiled=True),
}
COPIED = ("bfloat16", "float32", "int8", "bool", "float8_e4m3fn")
SUMMED = ("bfloat16", "float16", "float32", "int32")


def dtypes_of(name: str) -> tuple[str, ...]:
    """The types that a collective's kernel is for, of each width and kind one."""
    return SUMMED if name in ("all_reduce", "reduce_scatter") else COPIED


def collective(name: str, dtype: str = "bfloat16") -> Subject:
    """A collective of operands of `dtype`; its sizes are the rows and columns of a device."""
    sums = dtype in SUMMED and name in ("all_reduce", "reduce_scatter")

    def draw_one(key, shapes, *, whole):
        bounds = (0, 2) if dtype == "bool" else (-6, 7)  # Sums of so few are exact in any type.
        numbers = jax.random.randint(key, shapes[0], *bounds).astype(dtype)
        if whole is True or not sums or dtype == "int32":
            return [numbers]
        normal = rounded(jax.random.normal(key, shapes[0], F32), dtype)
        return [lax.select(jnp.broadcast_to(whole, shapes[0]), numbers, normal)]

    def call(operands, axis, **options):
        options.pop("out_dtype", None)
        return COLLECTIVES[name](operands[0], axis_name=axis, **options)

    def exact(operands, axis):
        (x,) = operands
        return PLAIN[name](x.astype(F32) if sums else x, axis).astype(F32)

    return Subject(
        name=name if dtype == "bfloat16" else f"{name} of {dtype}",
        shapes=lambda devices, sizes: [(sizes[0], sizes[1])],
        draw=draw_one,
        call=call,
        exact=exact,
        sizes_of=lambda devices, m, k, n: (devices * m, n),
        replicated=name in ("all_gather", "all_reduce"),
    )


# Operations that have a version for several nodes.
HIERARCHICAL = tuple(name for name, record in OPERATIONS.items() if record.between_nodes)

SUBJECTS: dict[str, Subject] = {
    **{name: _fused(name) for name in cases.FORMS},
    **{name: collective(name) for name in COLLECTIVES},
}


# --- Programs -------------------------------------------------------------------------------------


def own_key(seed: jax.Array, mesh: Mesh, *more: int | jax.Array) -> jax.Array:
    """A key that no other device has, and no other `more`."""
    key = jax.random.key(seed)
    for part in (lax.axis_index(mesh.axis_names), *more):
        key = jax.random.fold_in(key, part)
    return key


def team_size(mesh: Mesh, axis: Any) -> int:
    """Devices along `axis`, one or a tuple."""
    names = axis if isinstance(axis, tuple) else (axis,)
    return functools.reduce(lambda size, name: size * mesh.shape[name], names, 1)


def on_mesh(body: Callable, mesh: Mesh) -> Callable:
    """`body(*scalars)` on every device; what it returns comes stacked, device by device.

    Every process gets all of it: operands and result are the same on all devices.
    """

    def gathered(*scalars):
        return jax.tree.map(lambda x: lax.all_gather(x, mesh.axis_names), body(*scalars))

    return jax.shard_map(gathered, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
