"""What a model author may write around an operation, each with what `lax` makes of it.

A case takes one device's call and makes a program of whole operands of it. The tests make each
program twice, of Stretto's operation with `backend="auto"` and of `lax`'s, and compare.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import stretto as st

F32 = jnp.float32
ROWS, COLUMNS, EVERYWHERE = P("tp"), P(None, "tp"), P()
type OneDevice = Callable[..., Any]
type Whole = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """An operation on one device, of (x, w): Stretto's and `lax`'s, and how both lie."""

    call: OneDevice
    plain: OneDevice
    x: P
    w: P = EVERYWHERE
    out: P = ROWS


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    wide = F32 if x.dtype.itemsize < 4 and jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    wide = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else wide
    return jnp.matmul(x.astype(wide), w.astype(wide))


def _gathered(x: jax.Array, w: jax.Array, epilogue: Callable = lambda y: y) -> jax.Array:
    if 0 in x.shape:  # XLA refuses to move nothing.
        return jnp.zeros((0, w.shape[1]), x.dtype)
    return epilogue(_dot(lax.all_gather(x, "tp", tiled=True), w)).astype(x.dtype)


def _scattered(x: jax.Array, w: jax.Array) -> jax.Array:
    if 0 in x.shape:
        return jnp.zeros((0, w.shape[1]), x.dtype)
    return lax.psum_scatter(_dot(x, w).astype(x.dtype), "tp", tiled=True)


SUBJECTS: dict[str, Subject] = {
    "all_gather_matmul": Subject(
        call=lambda x, w: st.all_gather_matmul(x, w, "tp"), plain=_gathered, x=ROWS, w=COLUMNS
    ),
    "matmul_reduce_scatter": Subject(
        call=lambda x, w: st.matmul_reduce_scatter(x, w, "tp"), plain=_scattered, x=COLUMNS, w=ROWS
    ),
    "all_reduce": Subject(
        call=lambda x, w: st.all_reduce(x, "tp"), plain=lambda x, w: lax.psum(x, "tp"), x=ROWS
    ),
    "epilogue": Subject(
        call=lambda x, w: st.all_gather_matmul(x, w, "tp", epilogue=jax.nn.gelu),
        plain=functools.partial(_gathered, epilogue=jax.nn.gelu),
        x=ROWS,
        w=COLUMNS,
    ),
    "gathered columns": Subject(
        call=lambda x, w: st.all_gather_matmul(x, w, "tp", gather_axis="k"),
        plain=lambda x, w: _dot(lax.all_gather(x, "tp", axis=1, tiled=True), w).astype(x.dtype),
        x=COLUMNS,
        w=COLUMNS,
    ),
    "matmul_all_reduce": Subject(
        call=lambda x, w: st.matmul_all_reduce(x, w, "tp"),
        plain=lambda x, w: lax.psum(_dot(x, w).astype(x.dtype), "tp"),
        x=COLUMNS,
        w=ROWS,
    ),
    "all_gather": Subject(
        call=lambda x, w: st.all_gather(x, "tp", axis=1),
        plain=lambda x, w: lax.all_gather(x, "tp", axis=1, tiled=True),
        x=ROWS,
    ),
    "reduce_scatter": Subject(
        call=lambda x, w: st.reduce_scatter(x, "tp"),
        # JAX scatters no sum of nothing.
        plain=lambda x, w: lax.psum_scatter(x, "tp", tiled=True) if x.size else x,
        x=COLUMNS,
    ),
    "all_to_all": Subject(
        call=lambda x, w: st.all_to_all(x, "tp", split_axis=0, concat_axis=1),
        plain=lambda x, w: lax.all_to_all(x, "tp", 0, 1, tiled=True),
        x=COLUMNS,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One way of writing it.

    Attributes:
      make: (one device's call, subject, mesh) -> program of (x, w).
      reason: why XLA serves, as `explain` says it; None where a kernel can.
      said: what `explain` adds where a kernel serves.
      dtype: of the operands.
      empty: whether x has no rows.
      only: the subject that it is for, or all.
      heavy: it has several kernels, and takes long to compile or to simulate.
    """

    make: Callable[[OneDevice, Subject, Mesh], Whole]
    reason: str | None = None
    said: str | None = None
    dtype: Any = jnp.bfloat16
    empty: bool = False
    only: str | None = None
    heavy: bool = False


def mapped(call: OneDevice, subject: Subject, mesh: Mesh, **options: Any) -> Whole:
    return jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(subject.x, subject.w),
        out_specs=subject.out,
        **{"check_vma": False} | options,
    )


def loss(program: Whole) -> Whole:
    return lambda x, w: jnp.sin(program(x, w).astype(F32)).sum()


def plain(call, subject, mesh):
    return mapped(call, subject, mesh)


def typed(call, subject, mesh):
    return jax.grad(loss(mapped(call, subject, mesh, check_vma=True)), (0, 1))


def partly_manual(call, subject, mesh):
    return mapped(call, subject, mesh, axis_names={"tp"})


def jvp(call, subject, mesh):
    return lambda x, w: jax.jvp(mapped(call, subject, mesh), (x, w), (w, x))


def jvp_typed(call, subject, mesh):
    return lambda x, w: jax.jvp(mapped(call, subject, mesh, check_vma=True), (x, w), (w, x))


def linearized(call, subject, mesh):
    def program(x, w):
        out, tangent = jax.linearize(mapped(call, subject, mesh), x, w)
        return out, tangent(w, x)

    return program


def hessian_vector(call, subject, mesh):
    gradient = jax.grad(loss(mapped(call, subject, mesh)), (0, 1))
    return lambda x, w: jax.jvp(gradient, (x, w), (w, x))


def reverse_over_forward(call, subject, mesh):
    program = loss(mapped(call, subject, mesh))
    return jax.grad(lambda x, w: jax.jvp(program, (x, w), (w, x))[1], (0, 1))


def gradient_of_gradient(call, subject, mesh):
    gradient = jax.grad(loss(mapped(call, subject, mesh)), (0, 1))

    def norm(x, w):
        return sum(jnp.sum(jnp.square(g.astype(F32))) for g in gradient(x, w))

    return jax.grad(norm, (0, 1))


def jacobian(of, call, subject, mesh):
    program = loss(mapped(call, subject, mesh))
    return lambda x, w: of(lambda s: program(x * s[0], w * s[1]))(jnp.ones(2, x.dtype))


def remat(policy, call, subject, mesh):
    kept = jax.checkpoint(call, policy=policy)
    return jax.grad(loss(mapped(kept, subject, mesh)), (0, 1))


def scanned(call, subject, mesh):
    # The sine of large numbers would tell how each product was rounded.
    def body(x, w):
        return lax.scan(lambda x, _: (jnp.tanh(x), call(x, w) / 16), x, length=2)[1].sum(0)

    return jax.grad(loss(mapped(body, subject, mesh)), (0, 1))


def in_a_branch(call, subject, mesh):
    def body(x, w):
        return lax.cond(jnp.array(True), call, lambda x, w: 2 * call(x, w), x, w)

    return mapped(body, subject, mesh)


def in_a_custom_rule(call, subject, mesh):
    @jax.custom_vjp
    def wrapped(x, w):
        return call(x, w)

    wrapped.defvjp(lambda x, w: jax.vjp(call, x, w), lambda pull, bar: pull(bar))
    return jax.grad(loss(mapped(wrapped, subject, mesh)), (0, 1))


def batched(call, subject, mesh):
    def body(x, w):
        return jax.vmap(call, (0, None))(jnp.stack([x, 2 * x, 3 * x]), w).sum(0)

    return jax.grad(loss(mapped(body, subject, mesh)), (0, 1))


def batched_outside(call, subject, mesh):
    program = mapped(call, subject, mesh)
    return lambda x, w: jax.vmap(program)(jnp.stack([x, 2 * x]), jnp.stack([w, w]))


def gradients_of_a_batch(call, subject, mesh):
    gradient = jax.grad(loss(mapped(call, subject, mesh)), (0, 1))
    return lambda x, w: jax.vmap(gradient, (0, None))(jnp.stack([x, 2 * x]), w)


def batch_over_another_axis(call, subject, mesh):
    program = jax.vmap(mapped(call, subject, mesh), spmd_axis_name="dp")
    return lambda x, w: program(jnp.stack([x, 2 * x]), jnp.stack([w, w]))


def team_of_a_vmap(call, subject, mesh):
    size = mesh.shape["tp"]

    def split(whole, spec):
        return jnp.stack(jnp.split(whole, size, 0 if spec == ROWS else 1))

    def program(x, w):
        return jax.vmap(call, axis_name="tp")(split(x, subject.x), split(w, subject.w))

    return program


def nested(call, subject, mesh):
    """Each axis of the mesh taken over by a `shard_map` of its own."""

    def inner(x, w):
        return jax.shard_map(
            call,
            in_specs=(subject.x, subject.w),
            out_specs=subject.out,
            axis_names={"tp"},
            check_vma=False,
        )(x, w)

    return jax.shard_map(
        inner, mesh=mesh, in_specs=(P(), P()), out_specs=P(), axis_names={"dp"}, check_vma=False
    )


def exported(call, subject, mesh):
    """Rows of a number that is known when the program runs."""
    program = jax.jit(mapped(call, subject, mesh))

    def run(x, w):
        (count,) = jax.export.symbolic_shape("b")
        rows = mesh.shape["tp"] ** 2 * count
        specs = [
            jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype),
            jax.ShapeDtypeStruct(w.shape, w.dtype),
        ]
        jax.export.export(program, platforms=["cpu"])(*specs)
        return program(x, w)  # JAX 0.11.2 cannot call what it exported, if that has a matmul.

    return run


def weak(call, subject, mesh):
    def body(x, w):
        return call(jnp.broadcast_to(2.0, x.shape), jnp.broadcast_to(1.5, w.shape)) + x.sum()

    return jax.grad(loss(mapped(body, subject, mesh)), (0, 1))


def from_numpy(call, subject, mesh):
    def body(x, w):
        return call(np.ones(x.shape, x.dtype), np.ones(w.shape, w.dtype))

    return mapped(body, subject, mesh)


def transposed(call, subject, mesh):
    def program(x, w):
        linear = mapped(call, subject, mesh)
        out = linear(x, w)
        return jax.linear_transpose(lambda x: linear(x, w), x)(out)

    return program


def _with_epilogue(epilogue_of, call, subject, mesh):
    """An all-gather matmul whose epilogue uses what `epilogue_of` (the mapped values) gives."""

    def body(x, w):
        epilogue = epilogue_of(x, w)
        if call is subject.plain:
            return _gathered(x, w, epilogue)
        return st.all_gather_matmul(x, w, "tp", epilogue=epilogue)

    program = mapped(body, subject, mesh)
    # A program that is differentiated applies it beside the kernel.
    return lambda x, w: (program(x, w), jax.grad(loss(program), (0, 1))(x, w))


def _with_arrays(epilogue_of, call, subject, mesh):
    """The same of an epilogue whose arrays stand beside its function."""

    def body(x, w):
        epilogue = epilogue_of(x, w)
        if call is subject.plain:
            arrays = [a.astype(F32) for a in epilogue.arrays]
            return _gathered(x, w, lambda y: epilogue.function(y, *arrays))
        return st.all_gather_matmul(x, w, "tp", epilogue=epilogue)

    return mapped(body, subject, mesh)


def epilogue(epilogue_of: Callable, said: str | None, *, heavy: bool = False) -> Case:
    """One that XLA applies to the kernel's product, as is `said`; None where the kernel does."""
    make = functools.partial(_with_epilogue, epilogue_of)
    return Case(make=make, said=said, only="all_gather_matmul", heavy=heavy)


HALF = jnp.float32(0.5)
ELSEWHERE = r"axis 'dp' of the mesh is left to the compiler"
CASES: dict[str, Case] = {
    "plain": Case(make=plain),
    "typed": Case(make=typed),
    "axes left to the compiler": Case(make=partly_manual, reason=ELSEWHERE, dtype=F32),
    "jvp": Case(make=jvp),
    "jvp, typed": Case(make=jvp_typed),
    "linearize": Case(make=linearized),
    "Hessian-vector product": Case(make=hessian_vector),
    "reverse over forward": Case(make=reverse_over_forward),
    "gradient of a gradient": Case(make=gradient_of_gradient),
    "jacfwd": Case(make=functools.partial(jacobian, jax.jacfwd)),
    "jacrev": Case(make=functools.partial(jacobian, jax.jacrev)),
    "hessian": Case(make=functools.partial(jacobian, jax.hessian)),
    "remat": Case(make=functools.partial(remat, None)),
    "remat but for names": Case(
        make=functools.partial(remat, jax.checkpoint_policies.save_only_these_names("gathered"))
    ),
    "scan": Case(make=scanned),
    "branch": Case(make=in_a_branch),
    "custom_vjp around": Case(make=in_a_custom_rule),
    "vmap": Case(make=batched),
    "vmap outside": Case(make=batched_outside),
    "vmap of gradients": Case(make=gradients_of_a_batch),
    "vmap over another axis": Case(make=batch_over_another_axis),
    "vmap as the team": Case(make=team_of_a_vmap, reason="axis 'tp' is mapped by jax.vmap"),
    "nested shard_map": Case(make=nested, dtype=F32),
    "export": Case(make=exported, reason="known when the program runs"),
    "linear_transpose": Case(make=transposed, only="all_reduce"),
    **{
        f"linear_transpose of {name}": Case(make=transposed, only=name, heavy=True)
        for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    },
    "weak types": Case(make=weak, dtype=F32),
    "NumPy": Case(make=from_numpy),
    "nothing": Case(make=plain, empty=True),
    "float8": Case(make=plain, dtype=jnp.float8_e4m3fn),
    "float8 gradients": Case(make=typed, dtype=jnp.float8_e5m2),
    "int8": Case(make=plain, dtype=jnp.int8),
    "complex": Case(make=plain, dtype=jnp.complex64),
    "traced scalar": epilogue(
        lambda x, w: lambda y: y * w[0, 0], "uses a traced value", heavy=True
    ),
    "row of biases": epilogue(lambda x, w: lambda y: y + w[0], "fits results of shape", heavy=True),
    "places": epilogue(
        lambda x, w: lambda y: y + jnp.arange(y.shape[1]) * HALF, "the place in", heavy=True
    ),
    "size": epilogue(lambda x, w: lambda y: y / y.shape[1], "depends on the size", heavy=True),
    "operation that kernels lack": epilogue(lambda x, w: jax.nn.softplus, "uses log1p"),
    "scalar array": epilogue(lambda x, w: lambda y: y * HALF, None, heavy=True),
    "bias beside the function": Case(
        make=functools.partial(_with_arrays, lambda x, w: st.epilogues.gelu(w[0])),
        only="all_gather_matmul",
    ),
}
