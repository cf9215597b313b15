"""What XLA for H100s makes of rounding to 8 bits: it must not be left out."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.tools import aot
from stretto.kernels.xla import scaled_matmul as by_xla
from stretto.kernels.xla.quantisation import dequantise

pytestmark = pytest.mark.skipif(
    not aot.is_available(), reason="needs the compiler: `uv sync --group aot`"
)
ROUNDED = re.compile(r"= (f8\w+)\[([\d,]+)\]\S* convert\(")
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def compiled(f, *operands: tuple[tuple[int, ...], str]) -> str:
    """The optimised HLO of `f` for one H100, as a device of a mesh."""
    mesh = aot.mesh_of_gpus((1,), ("x",))
    sharding = NamedSharding(mesh, P())
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in operands]
    return jax.jit(mapped).lower(*given).compile().as_text() or ""


def rounded(hlo: str) -> list[tuple[str, str]]:
    """Types and shapes of what is made from wider numbers."""
    return sorted(ROUNDED.findall(hlo))


def size(shape: str) -> int:
    return math.prod(map(int, shape.split(",")))


def test_values_are_rounded_whoever_reads_them():
    """Also where the same program makes them wider again, in a user's own way too."""

    def back(x):
        values, scale = st.quantise(x, "row")
        of_5_bits, _ = st.quantise(x, "tensor", E5M2)
        return dequantise(values, scale), values.astype(jnp.float32), of_5_bits.astype(x.dtype)

    hlo = compiled(back, ((256, 512), "float32"))
    assert rounded(hlo) == [("f8e4m3fn", "256,512"), ("f8e5m2", "256,512")]


def test_products_by_xla_are_of_rounded_operands():
    """Those that XLA multiplies in wider types, of values that no `quantise` made."""

    shapes = (256, 512), (384, 512), (256, 256), (128, 256), (256, 128), (3, 64, 128)
    types = E4M3, E4M3, E5M2, E5M2, E5M2, E4M3

    def products(*wide):
        a, b, c, d, e, f = (x.astype(kind) for x, kind in zip(wide, types, strict=True))
        of_a, of_b = jnp.ones((256, 4)), jnp.ones((3, 4))
        of_rows, of_columns, of_groups = (
            jnp.ones((256, 1)),
            jnp.ones((128, 1)),
            jnp.ones((3, 64, 1)),
        )
        ends = jnp.array([100, 200, 256])
        return (
            by_xla.scaled_matmul(a, b, of_a, of_b, "block", rhs_transposed=True),
            by_xla.scaled_matmul(c, d, of_rows, of_columns, "row", rhs_transposed=True),
            by_xla.scaled_ragged_matmul(e, f, ends, of_rows, of_groups, "row", rhs_transposed=True),
        )

    hlo = compiled(products, *((shape, "float32") for shape in shapes))
    found = sorted((kind, size(shape)) for kind, shape in rounded(hlo))
    names = (jnp.dtype(kind).name.replace("float8_", "f8") for kind in types)
    assert found == sorted(zip(names, map(math.prod, shapes), strict=True))
