"""Derivatives of the fused matmuls: those of pure lax, by fused kernels, in any transformation."""

from __future__ import annotations

import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import BF16, F32
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from selection import slow

import stretto as st
from stretto.kernels.problem.machine import Machine
from stretto.kernels.xla import matmul

DEVICES = 2
everywhere = pytest.mark.parametrize("name", cases.OPERATIONS)
# For what JAX does around an operation, whichever it is.
mostly = pytest.mark.parametrize(
    "name",
    [
        "all_gather_matmul",
        slow("matmul_reduce_scatter"),
        slow("matmul_all_reduce"),
    ],
)


@pytest.fixture(autouse=True)
def simulation():
    with st.simulate(seed=2, core_count=2) as report:
        yield report
    assert report.ok, str(report)


def pure_lax(name):
    """The operation on whole arrays, with nothing of ours in it, in float32."""

    def call(lhs, rhs):
        lhs, rhs = lhs.astype(F32), rhs.astype(F32)
        if name == "all_gather_matmul":
            return lax.all_gather(lhs, "x", tiled=True) @ rhs
        if name == "matmul_reduce_scatter":
            return lax.psum_scatter(lhs @ rhs, "x", tiled=True)
        return lax.psum(lhs @ rhs, "x")

    in_specs, out_spec = cases.specs(name)
    mesh = cases.mesh_of(DEVICES)
    return jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_spec)


def fused(name, **options):
    options = dict(out_dtype=F32) | options
    return cases.mapped(name, cases.mesh_of(DEVICES), **options)


def operands(name, m=16, k=16, n=16, dtype=BF16):
    return [jnp.asarray(x, dtype) for x in cases.operands(*cases.whole(name, DEVICES, m, k, n))]


def weighted(product, *operands):
    """A loss whose derivative by the result differs from element to element."""
    out = product(*operands).astype(F32)
    return jnp.sum(out * jnp.sin(jnp.arange(out.size, dtype=F32)).reshape(out.shape))


def assert_same(got, want, tolerance=1e-2):
    """Within a few roundings to bfloat16, relative to the largest."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        w = np.asarray(w, np.float32)
        np.testing.assert_allclose(np.asarray(g, np.float32), w, atol=tolerance * np.abs(w).max())


def gradients(product, *operands):
    return jax.jit(jax.grad(functools.partial(weighted, product), (0, 1)))(*operands)


@everywhere
def test_gradients_are_those_of_pure_lax(name):
    xs = operands(name, 20, 24, 40)
    assert_same(gradients(fused(name), *xs), gradients(pure_lax(name), *xs))


@mostly
def test_whole_numbers_make_exact_gradients(name):
    xs = operands(name)
    weights = jnp.asarray(cases.whole_numbers(9, xs[0].shape[0], xs[1].shape[1]))

    def loss(product, *xs):
        return jnp.sum(product(*xs).astype(F32) * weights)

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, product), (0, 1)))(*xs)
        for product in (fused(name), pure_lax(name))
    )
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))


@pytest.mark.parametrize("keep_gathered", [slow(False), True])
def test_epilogue_and_the_gathered_operand(keep_gathered, simulation):
    name = "all_gather_matmul"
    xs = operands(name)
    got = gradients(fused(name, epilogue=jnp.tanh, keep_gathered=keep_gathered), *xs)
    want = gradients(lambda *xs: jnp.tanh(pure_lax(name)(*xs)), *xs)
    assert_same(got, want)


@everywhere
def test_the_backward_pass_is_fused_too(name, simulation):
    jax.block_until_ready(gradients(lambda *xs: jnp.sin(fused(name)(*xs)), *operands(name)))
    # Forward; the operand's gradient; what is gathered for the weights', which a reduce-scatter's
    # derivative has gathered already. An all-reduce's derivative moves nothing more: where values
    # are not typed, XLA adds up what it is worth.
    launches = {"all_gather_matmul": 3, "matmul_reduce_scatter": 2, "matmul_all_reduce": 1}
    assert simulation.launches == launches[name]


def test_policies_of_remat_know_what_is_gathered_by_its_name(simulation):
    name = "all_gather_matmul"
    xs = operands(name)

    def layer(keep_gathered, *xs):
        product = fused(name, keep_gathered=keep_gathered)(*xs)
        return jnp.sin(checkpoint_name(product, "product"))

    policy = jax.checkpoint_policies.save_only_these_names("product", "gathered")
    for keep_gathered, launches in ((True, 2), (False, 3)):  # forward; scatter; gather again
        before = simulation.launches
        remat = jax.checkpoint(functools.partial(layer, keep_gathered), policy=policy)
        got = jax.block_until_ready(gradients(remat, *xs))
        assert simulation.launches - before == launches
        assert_same(got, gradients(lambda *xs: jnp.sin(pure_lax(name)(*xs)), *xs))


@mostly
def test_remat(name):
    xs = operands(name)
    got = gradients(jax.checkpoint(lambda *xs: jnp.sin(fused(name)(*xs))), *xs)
    assert_same(got, gradients(lambda *xs: jnp.sin(pure_lax(name)(*xs)), *xs))


def network(gather, scatter, x, layers):
    def layer(x, weights):
        up, down = weights
        return jnp.tanh(scatter(jnp.tanh(gather(x, up) / 8).astype(BF16), down) / 8).astype(BF16), 0

    return lax.scan(layer, x, layers)[0].astype(F32)


def network_operands(layers=2, m=16, k=32, n=32):
    def weights(seed, *shape):
        return jnp.asarray(cases.whole_numbers(seed, *shape), BF16)

    return weights(0, m, k), (weights(1, layers, k, n), weights(2, layers, n, k))


def test_scan_over_layers():
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    x, layers = network_operands()

    def loss(layers, products):
        return jnp.sum(network(*products, x, layers) ** 2)

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, products=products)))(layers)
        for products in (
            (fused(gather), fused(scatter)),
            (pure_lax(gather), pure_lax(scatter)),
        )
    )
    assert_same(got, want, tolerance=3e-2)


@pytest.mark.slow
@everywhere
def test_scan_over_microbatches_sums_to_the_whole_batch(name):
    """Accumulating over two microbatches gives the gradient of the batch (B31)."""
    lhs, rhs = operands(name)
    halves = jnp.stack([lhs, lhs * 2])

    def total(rhs):
        def step(sum_, lhs):
            return sum_ + jnp.sum(fused(name)(lhs, rhs) ** 2), None

        return lax.scan(step, jnp.float32(0), halves)[0]

    def at_once(rhs):
        return sum(jnp.sum(pure_lax(name)(lhs, rhs) ** 2) for lhs in halves)

    assert_same(jax.jit(jax.grad(total))(rhs), jax.jit(jax.grad(at_once))(rhs))


@mostly
def test_vmap_is_a_loop_of_launches(name, simulation):
    problems = [cases.operands(*cases.whole(name, DEVICES, 8, 16, 16), seed=s) for s in range(3)]
    lhs, rhs = (jnp.asarray(np.stack(x), BF16) for x in zip(*problems, strict=True))
    out = jax.jit(jax.vmap(fused(name)))(lhs, rhs)
    np.testing.assert_array_equal(np.asarray(out), np.stack([a @ b for a, b in problems]))
    assert simulation.launches == 3


@pytest.mark.slow
@everywhere
def test_vmap_of_one_operand_and_of_gradients(name):
    lhs, rhs = operands(name)
    several = jnp.stack([rhs, 2 * rhs])
    loss = functools.partial(weighted, fused(name))
    got = jax.jit(jax.vmap(jax.grad(loss, 1), in_axes=(None, 0)))(lhs, several)
    want = jax.grad(functools.partial(weighted, pure_lax(name)), 1)(lhs, rhs)
    assert_same(got, jnp.stack([want, want]))


@everywhere
@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_no_collective_that_is_not_needed(name, backend):
    """Forward and backward hold what the mathematics asks for, and no more (B31)."""
    xs = operands(name)
    program = fused(name, backend=backend)
    compiled = jax.jit(jax.grad(lambda *xs: weighted(program, *xs), (0, 1))).lower(*xs).compile()
    found = cases.collectives(compiled.as_text())
    if backend == "xla":
        allowed = {"all-gather", "reduce-scatter", "all-reduce"}
        assert sum(found.values()) <= 3, found
    else:
        # The weights' gradient gathers the operand again; the loss of whole arrays may be summed.
        allowed = {"all-gather", "all-reduce"}
        assert found.get("all-gather", 0) <= 1, found
        assert found.get("all-reduce", 0) <= 1, found
    assert set(found) <= allowed, found


def test_checked_types():
    """Under `check_vma=True` a replicated operand's gradient is summed over the team."""
    mesh = cases.mesh_of(DEVICES)
    lhs, rhs = operands("all_gather_matmul")
    rhs = rhs[:, :16]
    replicated, rows = P(None, None), P("x", None)

    def by(product):
        mapped = jax.shard_map(
            product, mesh=mesh, in_specs=(rows, replicated), out_specs=P(None, "x")
        )
        return gradients(mapped, lhs, rhs)

    got = by(lambda lhs, rhs: st.all_gather_matmul(lhs, rhs, "x", out_dtype=F32))
    want = by(lambda lhs, rhs: lax.all_gather(lhs, "x", tiled=True).astype(F32) @ rhs.astype(F32))
    assert_same(got, want, tolerance=3e-2)


@pytest.mark.parametrize("product", [matmul.matmul, matmul.matmul_of_columns])
def test_products_of_derivatives_by_xla_are_of_narrow_operands(monkeypatch, product):
    """A float32 cotangent would make XLA multiply in float32."""
    monkeypatch.setattr(Machine, "of_mesh", lambda: Machine.of_kind("gpu", "NVIDIA H100"))
    x = jnp.ones((8, 8), BF16)

    def loss(*xs):
        return jnp.sum(jnp.sin(product(*xs)))

    eqns = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, x).eqns
    dots = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    assert len(dots) == 2  # The product itself is within a call.
    assert {operand.aval.dtype for eqn in dots for operand in eqn.invars} == {jnp.dtype(BF16)}
