"""Programs in which systems like this one have gone wrong for their users, each with its answer.

A case is a function of (mesh, backend) that returns a body for `subjects.on_mesh`: seed -> how many
elements are wrong. `backend` is what the calls under test take; the answers come from `lax`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import fused_cases as cases
import jax
import jax.numpy as jnp
import subjects
from fused_cases import BF16, F32
from jax import lax
from jax.sharding import Mesh
from launching import differing
from subjects import SUBJECTS

import stretto as st

type Body = Callable[[jax.Array], jax.Array]

CASES: dict[str, Callable[[Mesh, str], Body]] = {}
M, K, N = 64, 128, 128  # of a device


def case(make: Callable[[Mesh, str], Body]) -> Callable[[Mesh, str], Body]:
    CASES[make.__name__] = make
    return make


def own(mesh: Mesh, name: str, seed: Any, *sizes: int) -> list[jax.Array]:
    """Operands of whole numbers, of a problem with `sizes` (or M, K, N) per device."""
    subject = SUBJECTS[name]
    shapes = subject.shapes(mesh.size, subject.sizes_of(mesh.size, *(sizes or (M, K, N))))
    return subject.draw(subjects.own_key(seed, mesh), shapes, whole=True)


def total(*counts: jax.Array) -> jax.Array:
    return functools.reduce(jnp.add, counts)


@case
def small_terms_beside_a_large_one(mesh, backend):
    """256 + 1 is 256 in bfloat16; sums across devices are made in float32 (B45)."""

    def body(seed):
        del seed
        first = lax.axis_index("x") == 0
        want = jnp.float32(256 + mesh.size - 1).astype(BF16).astype(F32)
        x = jnp.where(first, 256, 1).astype(BF16)
        column = jnp.full((8 * mesh.size, 64), x / 64)
        ones = jnp.ones((64, 136), BF16)
        outs = [
            st.all_reduce(jnp.full((40, 130), x), "x", backend=backend),
            st.reduce_scatter(jnp.full((8 * mesh.size, 130), x), "x", backend=backend),
            st.matmul_reduce_scatter(column, ones, "x", backend=backend),
            st.matmul_all_reduce(column, ones, "x", backend=backend),
        ]
        return total(*(differing(out, want) for out in outs))

    return body


@case
def ones_times_ones(mesh, backend):
    """Every element is the length of the contraction, on every path (B41)."""

    def body(seed):
        wrong = []
        for name in cases.OPERATIONS:
            operands = [jnp.ones_like(x) for x in own(mesh, name, seed, 40, 136, 72)]
            out = SUBJECTS[name].call(operands, "x", out_dtype=F32, backend=backend)
            k = 136 * (1 if name == "all_gather_matmul" else mesh.size)
            wrong.append(differing(out, jnp.float32(k)))
        return total(*wrong)

    return body


@case
def payloads_that_other_systems_take_for_signs(mesh, backend):
    """Zeros of both signs, subnormals, NaNs with a payload, infinities: bit for bit (B46)."""
    payloads = (0x00000000, 0x80000000, 0x80011653, 0x7FC12345, 0xFFA00001, 0x7F800000, 0xFFFFFFFF)

    def body(seed):
        del seed
        bits = jnp.tile(jnp.asarray(payloads, jnp.uint32), (4 * mesh.size, 9))
        bits = bits ^ (lax.broadcasted_iota(jnp.uint32, bits.shape, 0) % 2)
        bits = bits ^ lax.axis_index("x").astype(jnp.uint32) << 1
        x = lax.bitcast_convert_type(bits, F32)
        gathered = st.all_gather(x, "x", backend=backend)
        exchanged = st.all_to_all(x, "x", split_axis=0, concat_axis=1, backend=backend)

        def wrong(out, want):
            return jnp.sum(lax.bitcast_convert_type(out, jnp.uint32) != want, dtype=jnp.int32)

        return wrong(gathered, lax.all_gather(bits, "x", tiled=True)) + wrong(
            exchanged, lax.all_to_all(bits, "x", 0, 1, tiled=True)
        )

    return body


@case
def not_a_number_wherever_it_is(mesh, backend):
    """The sum is NaN where any device has one, and infinity minus infinity is (B46)."""

    def body(seed):
        del seed
        me, last = lax.axis_index("x"), mesh.size - 1
        x = jnp.zeros((8, 130), F32)
        x = x.at[0].set(jnp.where(me == 0, jnp.nan, 1))
        x = x.at[1].set(jnp.where(me == last, jnp.nan, 1))
        x = x.at[2].set(jnp.where(me == 0, jnp.inf, jnp.where(me == last, -jnp.inf, 0)))
        x = x.at[3].set(jnp.where(me == last, jnp.inf, 1))
        out = st.all_reduce(x, "x", backend=backend)
        right = jnp.stack([jnp.isnan(out[:3]).all(1), jnp.isnan(out[:3]).any(1)], 1).all()
        right &= (out[3] == jnp.inf).all() & (out[4:] == 0).all()
        return jnp.int32(~right)

    return body


@case
def strided_transposed_and_sliced_operands(mesh, backend):
    """What a view would be elsewhere (B42); a kernel fed by a slice, and one by another's slice."""

    def body(seed):
        wrong = []
        for name in cases.OPERATIONS:
            subject = SUBJECTS[name]
            lhs, rhs = own(mesh, name, seed, 64, 64, 64)
            wide = jnp.repeat(lhs, 2, axis=1).T  # Every other row of it is a column of lhs.
            stacked = jnp.stack([rhs + 1, rhs, rhs - 1])
            views = [wide[::2].T, lax.dynamic_index_in_dim(stacked, seed * 0 + 1, keepdims=False)]
            out = subject.call(views, "x", out_dtype=F32, backend=backend)
            exact = subject.exact([lhs, rhs], "x")
            parts = [jnp.sign(x[:64]).astype(BF16) for x in (out, exact)]
            again = [jnp.tile(part, (lhs.shape[0] // 64, 1)) for part in parts]
            second = subject.call([again[0], rhs], "x", out_dtype=F32, backend=backend)
            wrong += [differing(out, exact), differing(second, subject.exact([again[1], rhs], "x"))]
        return total(*wrong)

    return body


@case
def a_layer_beside_an_unrelated_kernel(mesh, backend):
    """Gather, epilogue, scatter; another all-reduce beside it; and a result that nobody uses."""

    def body(seed):
        lhs, up = own(mesh, "all_gather_matmul", seed)
        down = own(mesh, "matmul_reduce_scatter", seed + 2)[1]
        pair = own(mesh, "matmul_all_reduce", seed + 3)
        hidden = st.all_gather_matmul(
            lhs, up, "x", epilogue=jax.nn.relu, out_dtype=F32, backend=backend
        )
        st.all_gather_matmul(lhs + 1, up, "x", backend=backend)
        small = (hidden - 2 * jnp.floor(hidden / 2)).astype(BF16)
        out = st.matmul_reduce_scatter(small, down, "x", out_dtype=F32, backend=backend)
        summed = st.matmul_all_reduce(*pair, "x", out_dtype=F32, backend=backend)
        want = jax.nn.relu(subjects.product("all_gather_matmul", [lhs, up], "x"))
        want = subjects.product(
            "matmul_reduce_scatter", [want - 2 * jnp.floor(want / 2), down], "x"
        )
        return differing(out, want) + differing(
            summed, subjects.product("matmul_all_reduce", pair, "x")
        )

    return body


@case
def microbatches_layers_and_remat(mesh, backend):
    """Gradients through a scan over layers, rematerialised, in a scan over microbatches (B31).

    Whole numbers all the way, so that they are the same to the last bit. Most weights are 0, which
    keeps the numbers so small that no type rounds them.
    """

    def gradient(backend, lhs, up, down):
        def layer(x, weights):
            up, down = weights
            hidden = st.all_gather_matmul(x, up, "x", out_dtype=F32, backend=backend)
            hidden = (hidden - 2 * lax.stop_gradient(jnp.floor(hidden / 2))).astype(BF16)
            out = st.matmul_reduce_scatter(hidden, down, "x", out_dtype=F32, backend=backend)
            return (out - 2 * lax.stop_gradient(jnp.floor(out / 2))).astype(BF16), None

        def loss(weights, x):
            out, _ = lax.scan(jax.checkpoint(layer), x, weights)
            return out.astype(F32).sum()

        def add(sums, x):
            return jax.tree.map(jnp.add, sums, jax.grad(loss)((up, down), x)), None

        zeros = jax.tree.map(jnp.zeros_like, (up, down))
        return lax.scan(add, zeros, lhs)[0]

    def body(seed):
        lhs, up = own(mesh, "all_gather_matmul", seed, 8, 64, 64)
        down = own(mesh, "matmul_reduce_scatter", seed + 1, 8, 64, 64)[1]
        few = jax.random.bernoulli(subjects.own_key(seed + 2, mesh), 1 / 64, up.shape)
        operands = [jnp.stack([x, x]) for x in (lhs, up * few, down * few)]
        outs, wants = (gradient(b, *operands) for b in (backend, "xla"))
        return total(*(differing(o, w.astype(F32)) for o, w in zip(outs, wants, strict=True)))

    return body


@case
def a_loop_over_a_batch(mesh, backend):
    """`vmap` is a loop over launches, of all operations at once."""

    def body(seed):
        wrong = []
        for name, subject in SUBJECTS.items():
            operands = own(mesh, name, seed, 16, 64, 64)
            batch = [jnp.stack([x, jnp.zeros_like(x), x]) for x in operands]
            call = functools.partial(subject.call, axis="x", out_dtype=F32, backend=backend)
            outs = jax.vmap(lambda *xs, call=call: call(xs))(*batch)
            exact = subject.exact(operands, "x")
            wrong += [differing(outs[i], exact * (i != 1)) for i in range(3)]
        return total(*wrong)

    return body
