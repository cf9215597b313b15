"""Cases of `compile_cases`: kernels for B200s."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import fused_cases as cases
import jax
import jax.numpy as jnp
from compile_programs import Program, fused, on_one
from jax.sharding import Mesh

import stretto as st
from stretto.distributed.tools import aot
from stretto.kernels.engine.blackwell import tile_config as blackwell_tiles
from stretto.kernels.fused.local_matmul import local_matmul
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types


def blackwell(*names: str) -> Iterator[Program]:
    """The default configurations of fused matmuls for B200s."""
    mesh = aot.mesh_of_gpus((4,), ("x",), target="b200")
    for name in names:
        yield name, *fused(name, mesh)


def blackwell_alone() -> Iterator[Program]:
    """Shards of too few rows for pairs of blocks, on B200s."""
    mesh = aot.mesh_of_gpus((4,), ("x",), target="b200")
    for name in ("all_gather_matmul", "matmul_reduce_scatter"):
        yield name, *fused(name, mesh, (512, 1024, 2048))


def blackwell_configs(name: str) -> Iterator[Program]:
    """Every configuration for B200s that the tuner may choose, and other settings."""
    mesh = aot.mesh_of_gpus((4,), ("x",), target="b200")
    kernel = OPERATIONS[name].kernels[0]
    for config in kernel.candidates(problem_on(mesh, name)):
        if not getattr(config, "apart", False):
            yield f"{name} {config}", *fused(name, mesh, config=config)
    eight = aot.mesh_of_gpus((8,), ("x",), target="b200")
    yield "eight devices", *fused(name, eight, cases.whole(name, 8, 65, 72, 136))
    yield "float32 out of float16", *fused(name, mesh, dtype=jnp.float16, out_dtype=jnp.float32)
    if name == "all_gather_matmul":
        square = 2048, 512, 2048  # Of a device: k rows and n columns of rhs, or the reverse.
        yield "gelu", *fused(name, mesh, square, epilogue=jax.nn.gelu, rhs_transposed=True)


def problem_on(mesh: Mesh, name: str) -> Problem:
    """A problem of middling size on the devices of `mesh`."""
    device = mesh.devices.flat[0]
    return Problem(
        operation=name,
        sizes=dict(zip("mkn", (8192, 1024, 2048), strict=True)),
        types=Types(lhs="bfloat16", out="bfloat16"),
        devices=mesh.size,
        machine=Machine.of_kind("gpu", device.device_kind),
    )


def blackwell_fp8(*labels: str) -> Iterator[Program]:
    """Operands in 8 bits with scales on B200s, by one block and by pairs: those of `labels`."""
    mesh = aot.mesh_of_gpus((1,), ("x",), target="b200")
    e4m3, e5m2, f32, e8 = (
        jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.float8_e8m0fnu
    )  # fmt: skip

    def call(lhs, rhs, lhs_scale, rhs_scale, *, config):
        return local_matmul(
            lhs,
            rhs,
            config=config,
            rhs_transposed=True,
            lhs_scale=lhs_scale,
            rhs_scale=rhs_scale,
        )

    of_rows = [((4096, 1), f32)] * 2
    of_blocks, of_32 = [((4096, 32), f32), ((32, 32), f32)], [((4096, 128), e8)] * 2
    for label, config, scales, rhs in (
        ("rows", blackwell_tiles.LARGE_FP8, of_rows, e4m3),
        ("rows, pairs, mixed", blackwell_tiles.PAIR_FP8, of_rows, e5m2),
        ("blocks", blackwell_tiles.BLOCKS, of_blocks, e4m3),
        ("blocks, pairs", blackwell_tiles.PAIR_BLOCKS, of_blocks, e5m2),
        ("blocks of 32", blackwell_tiles.BLOCKS, of_32, e5m2),
        ("blocks of 32, pairs", blackwell_tiles.PAIR_BLOCKS, of_32, e4m3),
    ):
        operands = [((4096, 4096), e4m3), ((4096, 4096), rhs), *scales]
        if label in labels:
            yield f"fp8, {label}", *on_one(functools.partial(call, config=config), mesh, operands)


def blackwell_groups(which: str) -> Iterator[Program]:
    """Rows in groups on B200s: the product, or both derivatives as well."""
    mesh = aot.mesh_of_gpus((1,), ("x",), target="b200")

    def product(lhs, rhs, sizes, **options):
        return st.grouped_matmul(lhs, rhs, sizes, backend="pallas", **options)

    def derivatives(lhs, rhs, sizes, **options):
        def loss(x, y):
            return product(x, y, sizes, **options).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(lhs, rhs)

    shapes = [((2048, 1024), jnp.bfloat16), ((8, 1024, 2048), jnp.bfloat16), ((8,), jnp.int32)]
    if which == "product":
        yield "product", *on_one(product, mesh, shapes)
        return
    yield "derivatives", *on_one(derivatives, mesh, shapes)
    for config in OPERATIONS["grouped_matmul"].kernels[0].candidates(problem_on(mesh, "grouped")):
        body = functools.partial(product, config=config)
        yield f"{config}", *on_one(body, mesh, shapes)
    turned = [shapes[0], ((8, 2048, 1024), jnp.bfloat16), shapes[2]]
    body = functools.partial(product, rhs_transposed=True, out_dtype=jnp.float32)
    yield "transposed", *on_one(body, mesh, turned)


CASES: dict[str, Callable[[], Iterator[Program]]] = {
    # The all-reduce is the reduce-scatter's code, with more stores.
    "Blackwell": functools.partial(blackwell, "all_gather_matmul", "matmul_reduce_scatter"),
    "Blackwell, the others": functools.partial(
        blackwell, "matmul_all_reduce", "all_gather_matmul_k", "all_gather_matmul_n"
    ),
    **{
        f"Blackwell configs of {name}": functools.partial(blackwell_configs, name)
        for name in cases.FORMS
    },
    **{
        f"Blackwell groups, {which}": functools.partial(blackwell_groups, which)
        for which in ("product", "rest")
    },
    "Blackwell blocks alone": blackwell_alone,
    "Blackwell fp8": functools.partial(blackwell_fp8, "rows, pairs, mixed", "blocks"),
    "Blackwell fp8, the others": functools.partial(blackwell_fp8, "rows", "blocks, pairs"),
    "Blackwell fp8, scales of the tensor cores": functools.partial(
        blackwell_fp8, "blocks of 32", "blocks of 32, pairs"
    ),
}
