"""Whole checks of the fused matmuls as single programs, for GPUs and, small, for the simulator.

Operands are drawn on the devices, and what a kernel makes of them is compared there, with a
product in float32 of full precision: nothing large comes to the host, and one program is compiled
for a shape.
"""

from __future__ import annotations

import concurrent.futures
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
from fused_cases import BF16, F32
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

type Sizes = tuple[int, int, int]

# What `verify` finds, on each device.
FINDINGS = ("wrong", "differing", "ours_max", "xla_max", "ours_sum", "xla_sum")


def blocks(name: str, devices: int, sizes: Sizes) -> list[tuple[int, int]]:
    """Shapes of a device's lhs and rhs, of a whole problem of `sizes` m x k x n."""
    m, k, n = sizes
    if name == "all_gather_matmul":
        return [(m // devices, k), (k, n // devices)]
    return [(m, k // devices), (k // devices, n)]


def draw(key: jax.Array, shape: tuple[int, int], *, whole: bool | jax.Array, share: int):
    """A matrix in bfloat16: normal numbers, or -1, 0 and 1 of which one in `share` is not 0."""
    bits = jax.random.bits(key, shape, jnp.uint8)
    edge = 128 // share
    numbers = jnp.where(bits < edge, 1, jnp.where(bits >= 256 - edge, -1, 0)).astype(BF16)
    return lax.select(
        jnp.broadcast_to(whole, shape), numbers, jax.random.normal(key, shape, F32).astype(BF16)
    )


def draw_operands(key: jax.Array, shapes: Sequence[tuple[int, int]], *, whole: bool | jax.Array):
    """lhs and rhs of this device. So few are not 0 that partial sums stay below 256."""
    keys = jax.random.split(jax.random.fold_in(key, lax.axis_index("x")))
    return [
        draw(key, shape, whole=whole, share=share)
        for key, shape, share in zip(keys, shapes, (4, 2), strict=True)
    ]


def oracle(name: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The result in float32, by `lax`; nothing of ours is in it."""
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    lhs, rhs = lhs.astype(F32), rhs.astype(F32)
    if name == "all_gather_matmul":
        return product(lax.all_gather(lhs, "x", tiled=True), rhs)
    if name == "matmul_reduce_scatter":
        return lax.psum_scatter(product(lhs, rhs), "x", tiled=True)
    return lax.psum(product(lhs, rhs), "x")


def on_mesh(body: Callable, mesh: Mesh) -> Callable:
    """`body(*replicated)` on every device; what it returns is stacked."""
    return jax.shard_map(
        lambda *xs: jax.tree.map(lambda x: x[None], body(*xs)),
        mesh=mesh,
        in_specs=P(),
        out_specs=P("x"),
        check_vma=False,
    )


def verification(name: str, mesh: Mesh, sizes: Sizes, **options: Any) -> Callable:
    """A program (seed, whole numbers or normal ones) -> `FINDINGS` of every device.

    wrong: elements that are not the exact ones, rounded once.
    differing: whether an all-reduce gave this device other bits than another one.
    ours_max, xla_max, ours_sum, xla_sum: the largest and all errors, of the kernel and of XLA.
    """
    shapes = blocks(name, mesh.size, sizes)
    call = functools.partial(cases.OPERATIONS[name], axis_name="x")

    def body(seed, whole):
        lhs, rhs = draw_operands(jax.random.key(seed), shapes, whole=whole)
        ours, xla = call(lhs, rhs, **options), call(lhs, rhs, backend="xla")
        exact = oracle(name, lhs, rhs)
        errors = [jnp.abs(x.astype(F32) - exact) for x in (ours, xla)]
        bits = jnp.sum(lax.bitcast_convert_type(ours, jnp.uint16).astype(jnp.uint32) * 40503)
        differing = lax.pmax(bits, "x") != lax.pmin(bits, "x")
        return jnp.stack(
            [
                jnp.sum(ours != exact.astype(ours.dtype)).astype(F32),
                (differing if name == "matmul_all_reduce" else jnp.bool_(False)).astype(F32),
                *(e.max() for e in errors),
                *(e.sum() for e in errors),
            ]
        )

    return on_mesh(body, mesh)


def judge(label: str, whole: np.ndarray, normal: np.ndarray) -> Iterator[str]:
    """What is wrong with a kernel whose verification gave these, on whole and normal numbers."""
    exact = dict(zip(FINDINGS, whole.T, strict=True))
    found = dict(zip(FINDINGS, normal.T, strict=True))
    if exact["wrong"].any():
        yield f"{label}: wrong elements on whole numbers, by device: {exact['wrong']}"
    if exact["differing"].any() or found["differing"].any():
        yield f"{label}: devices hold different bits"
    for kind in ("max", "sum"):
        ours, xla = found[f"ours_{kind}"], found[f"xla_{kind}"]
        if not (ours.max() <= 2 * xla.max()):  # Also where one is not a number.
            yield f"{label}: {kind} error {ours.max():.4g}, XLA's {xla.max():.4g}"


def verify(name: str, mesh: Mesh, problems: Iterable[tuple[Sizes, dict[str, Any]]]) -> list[str]:
    """What is wrong with the kernel at any of the (sizes, options). Compiles them side by side."""
    start = jnp.int32(0), jnp.bool_(True)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        compiled = []
        for sizes, options in problems:
            program = jax.jit(verification(name, mesh, sizes, **options))
            compiled.append((sizes, options, pool.submit(program.lower(*start).compile)))
        found = []
        for number, (sizes, options, future) in enumerate(compiled):
            run = future.result()
            whole, normal = (
                np.asarray(run(jnp.int32(2 * number + flag), jnp.bool_(flag))) for flag in (1, 0)
            )
            label = f"{name} {'x'.join(map(str, sizes))} {options.get('config') or ''}"
            found += judge(label.rstrip(), whole, normal)
    return found


def launches(
    name: str, mesh: Mesh, sizes: Sizes, *, calls: int, delay_s: float = 0, **options: Any
) -> Callable:
    """A program (seed) -> wrong elements of every device, in `calls` calls with new data each.

    With `delay_s` the host keeps one device after the other from its call for so long.
    """
    shapes = blocks(name, mesh.size, sizes)
    call = functools.partial(cases.OPERATIONS[name], axis_name="x", out_dtype=F32, **options)

    def body(seed):
        def step(i, wrong):
            key = jax.random.fold_in(jax.random.key(seed), i)
            lhs, rhs = draw_operands(key, shapes, whole=True)
            if delay_s:
                lhs += held_up(i, mesh.size, delay_s).astype(lhs.dtype)
            return wrong + jnp.sum(call(lhs, rhs) != oracle(name, lhs, rhs))

        return lax.fori_loop(0, calls, step, jnp.int32(0))

    return on_mesh(body, mesh)


def held_up(i: jax.Array, devices: int, delay_s: float) -> jax.Array:
    """0, which comes late to device `i % devices`."""

    def wait(device, i):
        if int(device) == int(i) % devices:
            time.sleep(delay_s)
        return np.float32(0)

    shape = jax.ShapeDtypeStruct((), F32)
    return jax.pure_callback(wait, shape, lax.axis_index("x"), i)


def gradients(name: str, mesh: Mesh, sizes: Sizes) -> Callable:
    """A program (seed) -> largest errors of both gradients on every device, the kernel's and XLA's.

    `[2, 2]`: (kernel, XLA) x (lhs, rhs), relative to the largest element of the gradient.
    """
    shapes = blocks(name, mesh.size, sizes)

    def body(seed):
        operands = draw_operands(jax.random.key(seed), shapes, whole=False)

        def gradient(call):
            def loss(lhs, rhs):
                out = call(lhs, rhs).astype(F32)
                return jnp.sum(out * jnp.sin(jnp.arange(out.size, dtype=F32)).reshape(out.shape))

            return jax.grad(loss, (0, 1))(*(x.astype(F32) for x in operands))

        def by(backend):
            call = functools.partial(cases.OPERATIONS[name], axis_name="x", backend=backend)
            return gradient(lambda lhs, rhs: call(lhs.astype(BF16), rhs.astype(BF16)))

        exact = gradient(functools.partial(oracle, name))
        return jnp.stack(
            [
                jnp.stack([jnp.abs(g - e).max() / jnp.abs(e).max() for g, e in pairs])
                for pairs in (zip(by(b), exact, strict=True) for b in ("pallas", "xla"))
            ]
        )

    return on_mesh(body, mesh)
