"""Cases of `compile_cases`: kernels of the tests, which are not in Stretto."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import field_cases
import jax
import jax.numpy as jnp
import launching
import ragged_matmul
import scaled_matmul
import slow_peers
import subjects
import window_cases
from compile_fp8 import fp8
from compile_programs import Program, on_one, on_scalars
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stretto.distributed.tools import aot


def windows() -> Iterator[Program]:
    """Kernels whose stores are all flat copies, or none."""
    sharding = NamedSharding(aot.mesh_of_gpus((1,), ("x",)), P())
    for flat in (True, False):
        chosen = [case for case in window_cases.CASES.values() if case.flat == flat]

        def program(x, chosen=chosen):
            return window_cases.call(chosen), x

        yield f"{flat}", program, [jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)]


def gpu_tests() -> Iterator[Program]:
    """Programs of `tests/gpu`: what it compiles there must compile here."""
    mesh = aot.mesh_of_gpus((4,), ("x",))
    for name, make in field_cases.CASES.items():
        yield name, *on_scalars(make(mesh, "pallas"), mesh, 1)
    for name, subject in subjects.SUBJECTS.items():
        sizes = subject.sizes_of(4, 65, 72, 136)

        def body(seed, subject=subject, sizes=sizes):
            operands = launching.drawn(subject, mesh, sizes, "x", seed, 0)
            return subject.call(operands, "x", backend="pallas")[:1, :1]

        with slow_peers.signals(lambda send, sem: (slow_peers.sleep_on(sem.team, 2, 200), send())):
            yield f"{name} that dawdles", *on_scalars(body, mesh, 1)


def parts() -> Iterator[Program]:
    """Kernels of parts that are not in Stretto: tiles read from memory, another fold."""
    mesh = aot.mesh_of_gpus((1,), ("x",))
    shapes = [((4096, 8192), jnp.bfloat16), ((8192, 4096), jnp.bfloat16), ((8,), jnp.int32)]
    for label, options in {"plain": {}, "waits": dict(columns_per_gate=(1024, 2048))}.items():
        body = functools.partial(ragged_matmul.ragged_matmul, **options)
        yield label, *on_one(body, mesh, [*shapes, shapes[-1]])
    addend = ((8, 4096, 4096), jnp.float32)
    yield (
        "addend",
        *on_one(
            lambda lhs, rhs, sizes, groups, addend: ragged_matmul.ragged_matmul(
                lhs, rhs, sizes, groups, addend=addend
            ),
            mesh,
            [*shapes, shapes[-1], addend],
        ),
    )
    e4m3 = jnp.float8_e4m3fn
    scaled = [((4096, 4096), e4m3), ((4096, 4096), e4m3), ((32, 32), jnp.float32)]
    yield "scaled", *on_one(scaled_matmul.scaled_matmul, mesh, scaled)
    yield from fp8()


CASES: dict[str, Callable[[], Iterator[Program]]] = {
    "tests on GPUs": gpu_tests,
    "other parts": parts,
    "windows": windows,
}
