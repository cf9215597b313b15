"""Cases of `compile_cases`: the fused matmuls, with their configurations and epilogues."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import fused_cases as cases
import jax
import jax.numpy as jnp
from compile_programs import MIDDLING, Program, fused
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed import settings
from stretto.distributed.tools import aot
from stretto.kernels.engine.hopper.tile_config import SHARED, SHARED_WIDE
from stretto.kernels.operations import OPERATIONS

README = (1024, 512, 2048)  # On its first page.
ODD = (2006, 1040, 2064)  # With rows of multiples of 16 bytes.
SHARES = (5120, 5120, 5120)  # In whose last wave blocks share tiles (`engine/remainder.py`).


def configs(name: str) -> Iterator[Program]:
    """Every configuration of the fused kernel that the tuner may choose."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    for config in OPERATIONS[name].kernels[0].candidates(None):
        if not config.unfused:
            yield f"{name} {config}", *fused(name, mesh, config=config)


def some_configs(name: str) -> Iterator[Program]:
    """The first and the last of them: the largest tiles, and the other way to gather or store."""
    first, *_, last = configs(name)
    yield from (first, last)


def variants(name: str) -> Iterator[Program]:
    """The default configuration where it is hardest: many peers, sizes that fit no tile."""
    yield "eight devices", *fused(name, aot.mesh_of_gpus((8,), ("x",)))
    four = aot.mesh_of_gpus((4,), ("x",))
    awkward = cases.whole(name, 4, 65, 72, 136)
    yield "awkward", *fused(name, four, awkward)
    if name == "all_gather_matmul":
        yield "awkward, in shards", *fused(name, four, awkward, config=cases.IN_SHARDS)


def more_variants(name: str) -> Iterator[Program]:
    """The default configuration in other settings."""
    four = aot.mesh_of_gpus((4,), ("x",))
    square = aot.mesh_of_gpus((2, 2), ("x", "y"))
    two = aot.mesh_of_gpus((2,), ("x",))
    yield "two devices", *fused(name, two)
    shares = SHARED_WIDE if name == "matmul_all_reduce" else SHARED
    shared = OPERATIONS[name].kernels[0].Config(tiles=shares)
    yield "shared tiles", *fused(name, two, SHARES, config=shared)
    yield "float32 out of float16", *fused(name, four, dtype=jnp.float16, out_dtype=jnp.float32)
    yield "second axis", *fused(name, square, axis="y")
    yield "tuple of axes", *fused(name, square, axis=("x", "y"))


def epilogue() -> Iterator[Program]:
    mesh = aot.mesh_of_gpus((4,), ("x",))
    yield "gelu", *fused("all_gather_matmul", mesh, epilogue=jax.nn.gelu)


def epilogues_with_arrays() -> Iterator[Program]:
    """And one that comes with a rule for its derivative."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    yield "gelu, a short contraction", *fused("all_gather_matmul", mesh, README, epilogue="gelu")
    yield "relu", *fused("all_gather_matmul", mesh, epilogue=jax.nn.relu)
    yield "bias and residual", *with_arrays(mesh, gated=False)
    yield "two products", *with_arrays(mesh, gated=True)
    yield "a residual of a sum", *residual_of_a_sum(mesh)


def residual_of_a_sum(mesh: Mesh) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """A matmul reduce-scatter that adds an array as large as its result."""
    (m, k, n), specs = MIDDLING, (P(None, "x"), P("x"), P("x"))

    def call(lhs, rhs, residual):
        epilogue = st.epilogues.residual(residual)
        return st.matmul_reduce_scatter(lhs, rhs, "x", epilogue=epilogue, backend="pallas")

    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False)
    return mapped, [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip([(m, k), (k, n), (m, n)], specs, strict=True)
    ]


def epilogues_with_arrays_at_odd_sizes() -> Iterator[Program]:
    mesh, sizes = aot.mesh_of_gpus((2,), ("x",)), ODD
    yield "bias and residual", *with_arrays(mesh, gated=False, sizes=sizes)
    yield "two products", *with_arrays(mesh, gated=True, sizes=sizes)
    yield "transposed", *with_arrays(mesh, gated=True, sizes=sizes, transposed=True)


def with_arrays(
    mesh: Mesh, *, gated: bool, sizes=MIDDLING, transposed: bool = False
) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """An all-gather matmul whose epilogue has a bias and a residual, of one product or of two."""
    (m, k, n), rows, columns = sizes, P("x"), P(None, "x")
    side, of_side = (rows, (n, k)) if transposed else (columns, (k, n))
    make = st.epilogues.swiglu if gated else st.epilogues.gelu

    def call(lhs, first, second, bias, residual):
        epilogue = st.epilogues.chain(make(bias), st.epilogues.residual(residual))
        rhs = (first, second) if gated else first
        return st.all_gather_matmul(
            lhs, rhs, "x", rhs_transposed=transposed, epilogue=epilogue, backend="pallas"
        )

    specs = (rows, side, side, rows, columns)
    shapes = [(m, k), of_side, of_side, (n,), (m, n)]
    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=columns, check_vma=False)
    return mapped, [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]


def gathers(name: str) -> Iterator[Program]:
    """An all-gather matmul along another dimension, rhs given both ways where that matters."""
    yield "eight devices", *fused(name, aot.mesh_of_gpus((8,), ("x",)))
    four = aot.mesh_of_gpus((4,), ("x",))
    (lhs, rhs), out = cases.specs(name)
    call = functools.partial(
        cases.GATHERS[name],
        axis_name="x",
        rhs_transposed=True,
        epilogue=jax.nn.gelu,
        return_gathered=True,
        backend="pallas",
    )
    mapped = jax.shard_map(
        call, mesh=four, in_specs=(lhs, P(*rhs[::-1])), out_specs=(out, P()), check_vma=False
    )
    structs = [
        jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=NamedSharding(four, spec))
        for spec in (lhs, P(*rhs[::-1]))
    ]
    yield "transposed", mapped, structs


def odd_sizes(*names: str) -> Iterator[Program]:
    """Sizes that fit no tile, with rows of multiples of 16 bytes: nothing is copied or padded."""
    mesh = aot.mesh_of_gpus((2,), ("x",))
    for name in names:
        yield name, *fused(name, mesh, ODD)
        if name in cases.OPERATIONS:  # A tile of rhs lies otherwise where it is transposed.
            (lhs, rhs), out = cases.specs(name)
            turned = lhs, P(*rhs[::-1])
            call = functools.partial(
                cases.FORMS[name], axis_name="x", rhs_transposed=True, backend="pallas"
            )
            structs = [
                jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
                for shape, spec in zip([(2006, 1040), (2064, 1040)], turned, strict=True)
            ]
            mapped = jax.shard_map(call, mesh=mesh, in_specs=turned, out_specs=out, check_vma=False)
            yield f"{name}, transposed", mapped, structs


def batches() -> Iterator[Program]:
    """Batches of whole tiles along a later dimension, also with arrays of an epilogue."""
    mesh, split, columns = aot.mesh_of_gpus((2,), ("x",)), P(None, "x"), P(None, None, "x")
    (b, s, k, n), bf16 = (4, 1024, 1024, 2048), jnp.bfloat16

    def program(call, out, *operands):
        specs = tuple(spec for _, spec in operands)
        structs = [
            jax.ShapeDtypeStruct(shape, bf16, sharding=NamedSharding(mesh, spec))
            for shape, spec in operands
        ]
        return jax.shard_map(
            call, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False
        ), structs

    def gather(x, w, residual, scale):
        epilogue = (lambda y, r, f: y * f + r), residual, scale
        return st.all_gather_matmul(x, w, "x", axis=1, epilogue=epilogue, backend="pallas")

    def scatter(x, w):
        return st.matmul_reduce_scatter(x, w, "x", axis=1, backend="pallas")

    arrays = ((b, s, n), columns), ((b, s, 1), P())
    yield "gathered", *program(gather, columns, ((b, s, k), split), ((k, n), split), *arrays)
    yield "scattered", *program(scatter, split, ((b, s, n), columns), ((n, k), P("x")))


def no_limit() -> Iterator[Program]:
    """Waits that spin for ever, as measurements of what the limit costs need them."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    for name in cases.OPERATIONS:
        program, structs = fused(name, mesh)

        def unlimited(*operands, program=program):
            with settings.wait_limit(0):
                return program(*operands)

        yield name, unlimited, structs


def stacked() -> Iterator[Program]:
    """A loop that keeps the kernel's result for later and uses it, as a backward pass needs it."""
    mesh = aot.mesh_of_gpus((4,), ("x",))

    def body(x, weights):
        def layer(x, w):
            product = st.all_gather_matmul(x, w, "x", backend="pallas")
            return x + product[: len(x), :512], product

        return lax.scan(layer, x, weights)

    specs = P("x"), P(None, None, "x")
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=specs, out_specs=(P("x"), P(None, None, "x")), check_vma=False
    )
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip([(2048, 512), (3, 512, 4096)], specs, strict=True)
    ]
    yield "stacked", mapped, structs


CASES: dict[str, Callable[[], Iterator[Program]]] = {
    **{f"configs of {name}": functools.partial(configs, name) for name in cases.OPERATIONS},
    **{
        f"some configs of {name}": functools.partial(some_configs, name)
        for name in cases.OPERATIONS
    },
    **{f"variants of {name}": functools.partial(variants, name) for name in cases.OPERATIONS},
    **{f"more of {name}": functools.partial(more_variants, name) for name in cases.OPERATIONS},
    **{f"gathers of {name}": functools.partial(gathers, name) for name in cases.GATHERS},
    "odd sizes": functools.partial(odd_sizes, "matmul_reduce_scatter"),
    "odd sizes of gathers": functools.partial(
        odd_sizes, "all_gather_matmul", "all_gather_matmul_k"
    ),
    "batches": batches,
    "epilogue": epilogue,
    "epilogues with arrays": epilogues_with_arrays,
    "epilogues with arrays at odd sizes": epilogues_with_arrays_at_odd_sizes,
    "no limit": no_limit,
    "stacked": stacked,
}
