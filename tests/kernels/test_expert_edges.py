"""Experts at their edges: types of indices, sizes, meshes, derivatives of derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import on_devices
from fused_cases import BF16, F32
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed import residency
from stretto.distributed.compiling import Target, compiling_for
from stretto.distributed.team import Team
from stretto.kernels.collectives import (
    dispatch,
    dispatch_block,
    exchange,
    routed_dispatch,
    summation,
)
from stretto.kernels.fused import attention_config
from stretto.kernels.operations import mixture_rules
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types
from stretto.kernels.problem.routing import Routing

TABLES = dispatch.Config(tables=True)
OUT = P("x"), Routing(P("x"), P("x"), P(), P(), P())


def program(num_experts, **options):
    """`expert_dispatch` on two devices."""
    call = lambda x, index: st.expert_dispatch(x, index, "x", num_experts=num_experts, **options)  # noqa: E731
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=OUT, check_vma=False))


@pytest.mark.parametrize("tokens", [1, 2000])
def test_indices_of_64_bits(tokens):
    """What 32 bits cannot hold is out of range, and counted."""
    with jax.enable_x64(True):
        index = np.arange(4 * tokens).reshape(2 * tokens, 2) % 4
        index[0, 0] = 2**32 + 1
        x = jnp.ones((2 * tokens, 16), F32)
        call = program(4, backend="xla")
        for given in (index, index.astype(np.uint64)):
            _, routing = call(x, jnp.asarray(given))
            assert routing.out_of_range == 1
            assert routing.tokens_per_expert.sum() == 4 * tokens - 1


def test_more_choices_than_the_tables_kernel_stores():
    index = np.arange(2 * 129).reshape(2, 129) % 2
    x = jnp.ones((2, 16), F32)
    with st.simulate(core_count=2) as report:
        _, routing = program(2, backend="simulator", config=TABLES)(x, jnp.asarray(index))
        assert routing.tokens_per_expert.sum() == index.size
    assert report.ok
    sizes = dict(width=16, itemsize=4, rows=4096, num_blocks=64)
    assert "at most, not top_k=129" in str(
        routed_dispatch.obstacle(1, 129, 2, num_experts=2, **sizes)
    )
    many = routed_dispatch.obstacle(64, 8, 2, num_experts=2**22, **sizes)
    assert "num_experts=4194304 is too many" in str(many)


def test_many_choices_of_a_token_arrive_whose_first_loads_are_a_loop():
    """More tokens a block than slots, so that slots are filled again."""
    draw = np.random.default_rng(0)
    index = draw.integers(0, 4, (48, 150), np.int32)
    x = jnp.asarray(draw.standard_normal((48, 16)), F32)
    config = dispatch.Config(slots=5, num_blocks=2)
    assert config.slots * index.shape[1] > dispatch_block.MOST_UNROLLED
    with st.simulate(core_count=2) as report:
        rows, routing = program(4, backend="simulator", config=config)(x, jnp.asarray(index))
        rows, routing = jax.device_get((rows, routing))
    assert report.ok and report.launches
    wanted, expected = program(4, backend="xla")(x, jnp.asarray(index))
    np.testing.assert_array_equal(routing.positions, expected.positions)
    held = np.arange(len(rows) // 2) < np.sum(routing.group_sizes.reshape(2, -1), 1)[:, None]
    np.testing.assert_array_equal(rows[held.ravel()], np.asarray(wanted)[held.ravel()])


def test_many_choices_of_a_token_make_no_large_kernel():
    """It took 40 s to compile for 64 choices on four devices, and minutes for 200."""

    def size(top_k):
        shapes = jax.ShapeDtypeStruct((1024, 64), F32), jax.ShapeDtypeStruct((1024, top_k), "int32")
        call = program(4, config=dispatch.Config(num_blocks=8))
        with compiling_for(Target("h100", "NVIDIA H100 80GB HBM3", 132)):
            return str(jax.make_jaxpr(call)(*shapes)).count("\n")

    assert size(64) < 2 * size(16)


@pytest.mark.parametrize("config", [TABLES, dispatch.Config(tables=True, num_blocks=1)], ids=str)
def test_blocks_that_would_take_more_tokens_than_an_array_has_barriers(config):
    """XLA makes the tables: with one choice of each token, 4096 choices are 4096 tokens."""
    index = np.arange(2 * 40).reshape(2 * 40, 1) % 2
    x = jnp.arange(2 * 40 * 16.0).reshape(-1, 16)
    with st.simulate(core_count=2) as report:
        rows, routing = program(2, backend="simulator", config=config)(x, jnp.asarray(index))
    assert report.ok
    np.testing.assert_array_equal(routing.group_sizes, [40, 40])
    np.testing.assert_array_equal(rows[:40], x[::2])


def test_tables_do_not_vary_over_axes_of_the_tokens_alone():
    def positions(x, index):
        return st.expert_dispatch(x, index, "x", num_experts=2, backend="simulator", config=TABLES)[
            1
        ].positions

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    specs = (P("x", "y"), P("x"))
    call = jax.shard_map(positions, mesh=mesh, in_specs=specs, out_specs=P("x"))
    with st.simulate(core_count=2):
        jax.eval_shape(call, jnp.ones((2, 32), F32), jnp.zeros((2, 1), jnp.int32))


def test_a_number_of_experts_by_numpy():
    with st.simulate(core_count=2):
        call = program(np.int64(2), backend="simulator", config=TABLES)
        jax.eval_shape(call, jnp.ones((2, 16), F32), jnp.zeros((2, 1), jnp.int32))


def test_a_flag_is_no_capacity():
    with pytest.raises(ValueError, match="capacity=True is of type bool"):
        jax.eval_shape(program(2, capacity=True), jnp.ones((2, 16)), jnp.zeros((2, 1), jnp.int32))


def test_a_capacity_that_is_an_array():
    call = program(2, capacity=jnp.int32(3))
    rows, _ = jax.eval_shape(call, jnp.ones((2, 16)), jnp.zeros((2, 1), jnp.int32))
    assert rows.shape == (2 * 3, 16)


@pytest.mark.parametrize("operation", [st.mixture_of_experts, st.fp8.mixture_of_experts])
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (3, 0)])
@pytest.mark.parametrize("check_vma", [False, True])
def test_a_layer_of_no_choices(operation, tokens, top_k, check_vma):
    """Zeros, and cotangents of zeros; XLA's compiler for CPUs crashed on these."""

    def body(x, index, *others):
        call = lambda x, *others: operation(x, index, *others, "x")[0]  # noqa: E731
        out, pull = jax.vjp(call, x, *others)
        return out, pull(out + 1)

    shapes = (2 * tokens, 32), (2 * tokens, top_k), (2 * tokens, top_k), (4, 32, 32), (4, 16, 32)
    x, index, *others = (jnp.ones(shape, F32) for shape in shapes)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    how = dict(mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
    out, bars = jax.jit(jax.shard_map(body, **how))(x, index.astype(jnp.int32), *others)
    assert [y.shape for y in (out, *bars)] == [y.shape for y in (x, x, *others)]
    assert not any(np.any(y) for y in (out, *bars))


def test_a_type_on_the_wire_is_named_as_it_was_given():
    call = lambda x, i, w: st.expert_combine(x, w, i, "x", wire_dtype=jnp.int32)  # noqa: E731
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    mapped = jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(ValueError, match="wire_dtype=int32 must be of the same kind"):
        jax.eval_shape(mapped, jnp.ones((8, 16)), jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)))


def test_a_device_of_one_multiprocessor():
    with st.simulate(core_count=1):
        assert residency.most_blocks_beside_others() == 1


def test_derivatives_of_a_dispatch_with_tables_are_differentiated():
    x = jnp.arange(128, dtype=F32).reshape(2, 64) / 64
    index = jnp.array([[0, 1], [1, -1]], jnp.int32)

    def second(**options):
        def loss(x):
            rows, routing = program(2, **options)(x, index)
            each = np.arange(rows.shape[0] // 2)
            used = jnp.concatenate([each < routing.group_sizes[d] for d in range(2)])
            return jnp.sum(jnp.where(used[:, None], rows, 0) ** 3)

        return np.asarray(jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (x + 1,))[1])(x))

    want = second(backend="xla")
    assert np.abs(want).max() > 1
    with st.simulate(core_count=2):
        np.testing.assert_allclose(second(backend="simulator", config=TABLES), want, rtol=1e-6)


@pytest.mark.slow
def test_derivatives_of_a_layer_with_tables_are_differentiated():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 4, BF16)  # noqa: E731
    x, w_in, w_out = draw(2, 32), draw(2, 32, 64), draw(2, 32, 32)
    index, weights = jnp.array([[0, 1], [1, -1]], jnp.int32), jnp.ones((2, 2), F32)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def second(**options):
        call = jax.shard_map(
            lambda *xs: st.mixture_of_experts(*xs, "x", **options)[0],
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
            check_vma=False,
        )
        loss = lambda x: jnp.sum(jnp.sin(call(x, index, weights, w_in, w_out).astype(F32)))  # noqa: E731
        both = jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (jnp.ones_like(x),))[1])
        return np.asarray(both(x), np.float32)

    want = second(backend="xla")
    assert np.abs(want).max() > 0
    with st.simulate(core_count=2):
        found = second(backend="simulator", config=mixture_rules.Config(dispatch=TABLES))
    np.testing.assert_allclose(found, want, rtol=0.05, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize(("top_k", "fits"), [(16, True), (4096, False)])
def test_tables_leave_room_for_wide_rows(top_k, fits):
    """Two rows fit, and tables of whole chunks do not fit beside them."""
    width, tokens, devices = 49_152, 1024, 2
    sizes = dict(t=tokens, d=width, top_k=top_k)
    problem = Problem(
        operation="expert_dispatch",
        sizes=sizes,
        types=Types(lhs="bfloat16", rhs="int32", out="bfloat16"),
        devices=devices,
        machine=Machine.of_mesh(),
    )
    found = dispatch.KERNEL.obstacle(problem)
    assert (found is None) == fits, found
    if not fits:
        assert found and "tables of top_k=4096 do not fit" in found
        return

    def shared(x, positions):
        config = dispatch.Config(chunk=256)
        return dispatch.dispatch(x, positions, Team.along("x"), rows=64, config=config)

    x = jax.ShapeDtypeStruct((tokens, width), BF16)
    positions = jax.ShapeDtypeStruct((tokens, top_k), jnp.int32)
    with st.simulate(core_count=2):
        text = str(jax.make_jaxpr(on_devices(shared, devices, 2))(x, positions))
    assert "i32[3,168,16]" in text, "chunks of fewer tokens"


@pytest.mark.parametrize(
    ("name", "gated", "function"),
    [("relu", False, jax.nn.relu), ("geglu", True, lambda gate, up: jax.nn.gelu(gate) * up)],
)
def test_names_of_activations(name, gated, function):
    np.testing.assert_array_equal(layer_with(name, gated), layer_with(function, gated))


def test_names_that_no_activation_has():
    for wrong, message in (
        ("gelu", "'gelu' is not one of 'swiglu', 'geglu', the activations of gated"),
        (3, "activation=3 is of type int; pass a function or a name: 'gelu', 'silu'"),
    ):
        with pytest.raises(ValueError, match=message):
            layer_with(wrong, gated=True)


def layer_with(activation, gated):
    """A layer of four experts on two devices."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (8, 16), (8, 2), (4, 16, 32 if gated else 16), (4, 16, 16)
    given = [jax.random.normal(k, s, F32) for k, s in zip(keys, shapes, strict=True)]
    index = jnp.asarray(np.random.default_rng(0).integers(0, 4, (8, 2)), jnp.int32)

    def layer(index, x, *others):
        return st.mixture_of_experts(x, index, *others, "x", activation=activation)[0]

    return on_devices(layer, 2, 5)(index, *given)


@pytest.mark.parametrize(
    "config",
    [
        exchange.Config(slots=33, piece_rows=1),
        summation.Config(stages=33, piece_rows=1),
        attention_config.Config(pull_slots=33),
    ],
    ids=lambda config: type(config).__module__,
)
def test_configurations_of_more_buffers_than_an_array_has_barriers(config):
    """Mosaic GPU refuses them, as the kernel is compiled."""
    with pytest.raises(ValueError, match=r"(slots|stages)=33 must be (at most|between 2 and) 32"):
        config.check()
