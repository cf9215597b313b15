"""Lowers kernels for H100s without one, which is far quicker than to compile them.

    python lower_cases.py CASE FILE

writes what `compile_cases.py` does, without kernels: theirs are those of other cases.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import fused_cases as cases
import jax
import jax.numpy as jnp
from compile_programs import Program, fused
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.tools import aot

BOTH = ("all_gather_matmul", "matmul_all_reduce")
MOVES = ("gather", "exchange")
NARROW = ("bool", "int2", "int4", "uint4", "float4_e2m1fn", "complex64", "key")


def x64(fused_ones: Sequence[str], sums: Sequence[str], moved: Sequence[str]) -> Iterator[Program]:
    """Operations under `jax_enable_x64`, and moves of types of 64 bits."""
    four = aot.mesh_of_gpus((4,), ("x",))
    with jax.enable_x64(True):
        for name in fused_ones:
            yield name, *fused(name, four, cases.whole(name, 4, 65, 72, 136))
        for name in sums:
            call = functools.partial(getattr(st, name), axis_name="x", backend="pallas")
            yield name, *collective(four, call)
        yield "moves", *collective(four, moves_of(dict.fromkeys(MOVES, moved)))


def types(dtypes: Mapping[str, Sequence[str]]) -> Iterator[Program]:
    """Moves of arrays of types that no kernel takes as they are, large enough for one by `auto`."""
    call = moves_of(dtypes)
    yield "types", *collective(aot.mesh_of_gpus((4,), ("x",)), call, rows=1 << 17, backend="auto")


def moves_of(dtypes: Mapping[str, Sequence[str]]) -> Callable:
    """What is gathered and exchanged of arrays of these types each, or of random keys."""

    def call(x: jax.Array, backend: str = "pallas") -> list[jax.Array]:
        def of(dtype: str) -> jax.Array:
            if dtype != "key":
                return x.astype(dtype)
            return jax.random.wrap_key_data(x.astype(jnp.uint32).reshape(-1, 2))

        move = {
            "gather": functools.partial(st.all_gather, axis_name="x", backend=backend),
            "exchange": functools.partial(
                st.all_to_all, axis_name="x", split_axis=0, concat_axis=0, backend=backend
            ),
        }
        return [move[how](of(dtype)) for how, each in dtypes.items() for dtype in each]

    return call


def collective(
    mesh: Mesh, call: Callable, *, rows: int = 64, **options: Any
) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """`call` of `rows` x 512 of float32 on each device."""
    call = functools.partial(call, **options)
    mapped = jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    sharding = NamedSharding(mesh, P("x"))
    return mapped, [jax.ShapeDtypeStruct((mesh.size * rows, 512), jnp.float32, sharding=sharding)]


CASES: dict[str, Callable[[], Iterator[Program]]] = {
    "types": functools.partial(types, {"gather": NARROW, "exchange": ("int4", "key")}),
    "exchanges": functools.partial(types, {"exchange": NARROW}),
    "x64": functools.partial(x64, BOTH, ["all_reduce"], ["int64"]),
    "more x64": functools.partial(
        x64,
        [name for name in cases.FORMS if name not in BOTH],
        ["reduce_scatter"],
        ["float64", "complex128"],
    ),
}


def main(case: str, file: str) -> None:
    results = [
        dict(label=label, hlo=jax.jit(program).lower(*structs).as_text(), kernels=[])
        for label, program, structs in CASES[case]()
    ]
    pathlib.Path(file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
