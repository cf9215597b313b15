"""Cases of `compile_cases`: operands in 8 bits with scales."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import scaled_cases
from compile_programs import Program, on_one

import stretto as st
from stretto.distributed.tools import aot
from stretto.kernels.engine.hopper.tile_config import BLOCKS, BLOCKS_BY_THREE, LARGE_FP8
from stretto.kernels.fused.local_matmul import local_matmul
from stretto.kernels.xla.quantisation import Quantised


def fp8() -> Iterator[Program]:
    """Products of 8 bits with scales of rows and columns, and of blocks."""
    mesh = aot.mesh_of_gpus((1,), ("x",))
    e4m3, e5m2, f32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32

    def call(lhs, rhs, lhs_scale, rhs_scale, config, out_dtype=None):
        return local_matmul(
            lhs,
            rhs,
            out_dtype=out_dtype,
            config=config,
            rhs_transposed=True,
            lhs_scale=lhs_scale,
            rhs_scale=rhs_scale,
        )

    of_rows, of_blocks = [(4096, 1)] * 2, [(4096, 32), (32, 32)]
    for label, config, shapes, rhs in (
        ("rows", LARGE_FP8, of_rows, e4m3),
        ("rows, mixed", LARGE_FP8, of_rows, e5m2),
        ("blocks", BLOCKS, of_blocks, e4m3),
        ("blocks, three warpgroups", BLOCKS_BY_THREE, of_blocks, e4m3),
    ):
        operands = [((4096, 4096), e4m3), ((4096, 4096), rhs), *((s, f32) for s in shapes)]
        yield f"fp8, {label}", *on_one(functools.partial(call, config=config), mesh, operands)


def fp8_fused(*names: str, target: str = "h100") -> Iterator[Program]:
    """The fused matmuls in 8 bits, with each granularity's default configuration."""
    mesh = aot.mesh_of_gpus((4,), ("x",), target=target)
    for name in names:
        for kind in ("row", "block"):
            yield f"{name}, {kind}", *scaled_cases.program(name, kind, mesh)
            # Sums are folded in other registers then.
            if kind == "row" and name != "all_gather_matmul":
                options = dict(out_dtype=jnp.float32)
                yield f"{name}, float32", *scaled_cases.program(name, kind, mesh, **options)


def fp8_in_place() -> Iterator[Program]:
    """The reduce-scatter in 8 bits of two devices, which the copy engine adds."""
    mesh = aot.mesh_of_gpus((2,), ("x",))
    for kind in ("row", "tensor", "block"):
        yield kind, *scaled_cases.program("matmul_reduce_scatter", kind, mesh)


def fp8_mx(*names: str) -> Iterator[Program]:
    """The matmuls in 8 bits with scales that Blackwell's tensor cores apply, groups as well."""
    mesh = aot.mesh_of_gpus((4,), ("x",), target="b200")
    for name in names:
        yield f"{name}, mx", *scaled_cases.program(name, "mx", mesh)
    e4m3, e8 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
    operands = [((4096, 2048), e4m3), ((8, 1536, 2048), e4m3), ((8,), jnp.int32)]
    operands += [((4096, 64), e8), ((8, 1536, 64), e8)]

    def call(lhs, rhs, sizes, lhs_scale, rhs_scale):
        given = dict(lhs_scale=lhs_scale, rhs_scale=rhs_scale, backend="pallas")
        return st.grouped_matmul(lhs, rhs, sizes, rhs_transposed=True, **given)

    one = aot.mesh_of_gpus((1,), ("x",), target="b200")
    yield "grouped_matmul, mx", *on_one(call, one, operands)


def fp8_groups(target: str = "h100") -> Iterator[Program]:
    """Groups of rows in 8 bits."""
    mesh = aot.mesh_of_gpus((1,), ("x",), target=target)
    e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
    for kind, shapes in (
        ("row", [(4096, 1), (8, 1536, 1)]),
        ("block", [(4096, 16), (8, 12, 16)]),
    ):
        operands = [((4096, 2048), e4m3), ((8, 1536, 2048), e4m3), ((8,), jnp.int32)]
        operands += [(shape, f32) for shape in shapes]

        def call(lhs, rhs, sizes, lhs_scale, rhs_scale):
            given = dict(lhs_scale=lhs_scale, rhs_scale=rhs_scale, backend="pallas")
            return st.grouped_matmul(lhs, rhs, sizes, rhs_transposed=True, **given)

        yield f"grouped_matmul, {kind}", *on_one(call, mesh, operands)


def fp8_experts() -> Iterator[Program]:
    """A layer of experts in 8 bits, and its derivatives, with each granularity of scales."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    tokens, d, f, experts, top_k = 256, 2048, 768, 8, 4
    shapes = [((tokens, d), jnp.bfloat16), ((tokens, top_k), jnp.int32)]
    shapes += [((tokens, top_k), jnp.float32)]
    shapes += [(shape, jnp.bfloat16) for shape in ((experts, d, 2 * f), (experts, f, d))]
    for granularity in ("row", "block"):
        recipe = st.fp8.Recipe(granularity=granularity)

        def pulled(x, index, weights, w_in, w_out, recipe=recipe):
            def call(x, weights, w_in, w_out):
                given = dict(recipe=recipe, backend="pallas")
                return st.fp8.mixture_of_experts(x, index, weights, w_in, w_out, "x", **given)[0]

            out, pull = jax.vjp(call, x, weights, w_in, w_out)
            return out, *pull(out)

        yield f"experts, {granularity}", *on_one(pulled, mesh, shapes)
    e4m3, recipe = jnp.float8_e4m3fn, st.fp8.Recipe()
    of_weights = [((experts, 2 * f, d), e4m3), ((experts, 2 * f, 1), jnp.float32)]
    of_weights += [((experts, d, f), e4m3), ((experts, d, 1), jnp.float32)]

    def alone(x, index, weights, w_in, of_in, w_out, of_out):
        sides = Quantised(w_in, of_in), Quantised(w_out, of_out)
        given = dict(recipe=recipe, backend="pallas")
        return st.fp8.mixture_of_experts(x, index, weights, *sides, "x", **given)[0]

    yield "experts, row, no derivative", *on_one(alone, mesh, [*shapes[:3], *of_weights])


CASES: dict[str, Callable[[], Iterator[Program]]] = {
    **{f"fp8, {name}": functools.partial(fp8_fused, name) for name in scaled_cases.NAMES},
    "fp8, in place": fp8_in_place,
    "fp8, grouped_matmul": fp8_groups,
    "fp8, experts": fp8_experts,
    **{
        f"Blackwell fp8, {name}": functools.partial(fp8_fused, name, target="b200")
        for name in scaled_cases.NAMES
    },
    "Blackwell fp8, grouped_matmul": functools.partial(fp8_groups, target="b200"),
    "Blackwell fp8, mx": functools.partial(fp8_mx, *scaled_cases.NAMES),
}
