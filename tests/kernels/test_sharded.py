"""Operations on whole arrays: a mesh given, found, or in the types of the operands."""

from __future__ import annotations

import contextlib
import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from selection import slow

import stretto as st

# Of [batch, sequence, k] and [k, n], on devices along "dp" and "tp".
LAYOUTS = {
    "gather": (
        st.all_gather_matmul,
        dict(axis=1),
        P("dp", "tp"),
        P(None, "tp"),
        P("dp", None, "tp"),
    ),
    "columns": (
        st.all_gather_matmul,
        dict(gather_axis="k"),
        P("dp", None, "tp"),
        P(None, "tp"),
        P("dp", None, "tp"),
    ),
    "weights": (st.all_gather_matmul, dict(gather_axis="n"), P("dp"), P(None, "tp"), P("dp")),
    "scatter": (
        st.matmul_reduce_scatter,
        dict(axis=1),
        P("dp", None, "tp"),
        P("tp"),
        P("dp", "tp", None),
    ),
    "sum": (st.matmul_all_reduce, {}, P("dp", None, "tp"), P("tp"), P("dp")),
}
everywhere = pytest.mark.parametrize("layout", LAYOUTS)


def mesh_of(kind: AxisType) -> Mesh:
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return Mesh(devices, ("dp", "tp"), axis_types=(kind, kind))


def operands(mesh: Mesh, *specs: P) -> list[jax.Array]:
    shapes = (4, 8, 16), (16, 24)
    return [
        jax.device_put(
            jnp.asarray(cases.whole_numbers(i, *shape), cases.BF16), NamedSharding(mesh, spec)
        )
        for i, (shape, spec) in enumerate(zip(shapes, specs, strict=True))
    ]


def dimensions(spec: P) -> tuple:
    """The axes of each dimension, without those at the end that lie along none."""
    entries = [(x,) if isinstance(x, str) else tuple(x or ()) for x in spec]
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


@everywhere
@pytest.mark.parametrize(
    ("kind", "jitted"),
    [
        slow(AxisType.Explicit, False),
        (AxisType.Explicit, True),
        (AxisType.Auto, False),
        slow(AxisType.Auto, True),
    ],
)
def test_products_and_how_they_lie(layout, kind, jitted):
    call, options, x_spec, w_spec, out_spec = LAYOUTS[layout]
    mesh = mesh_of(kind)
    x, w = operands(mesh, x_spec, w_spec)
    known = dict(mesh=mesh, in_specs=(x_spec, w_spec)) if jitted and kind == AxisType.Auto else {}
    program = functools.partial(st.sharded(call, **known), axis_name="tp", **options)
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        out = jax.jit(program)(x, w) if jitted else program(x, w)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x) @ np.asarray(w))
    assert dimensions(out.sharding.spec) == dimensions(out_spec)


@pytest.mark.parametrize("layout", ["gather", "scatter"])
def test_gradients_simulated(layout):
    call, options, x_spec, w_spec, _ = LAYOUTS[layout]
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, w = operands(mesh, x_spec, w_spec)

        def loss(product):
            return lambda x, w: jnp.sum(product(x, w).astype(jnp.float32) ** 2)

        plain = jax.grad(loss(jnp.matmul), (0, 1))(*(jnp.asarray(np.asarray(y)) for y in (x, w)))
        ours = functools.partial(st.sharded(call), axis_name="tp", **options)
        with st.simulate(seed=0) as report:
            found = jax.jit(jax.grad(loss(ours), (0, 1)))(x, w)
    for got, want in zip(found, plain, strict=True):
        largest = np.abs(np.asarray(want, np.float32)).max()
        difference = np.asarray(got, np.float32) - np.asarray(want, np.float32)
        assert np.abs(difference).max() <= 0.02 * largest
    assert report.launches == (3 if layout == "gather" else 2)


def test_several_right_hand_sides_and_a_transposed_one():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, w = operands(mesh, P("dp", "tp"), P(None, "tp"))
        call = st.sharded(st.all_gather_matmul)
        (one, two), whole = call(x, (w, 2 * w), "tp", axis=1, return_gathered=True)
        turned = call(x, w.T, "tp", axis=1, rhs_transposed=True)
    wanted = np.asarray(x) @ np.asarray(w)
    for found, want in [(one, wanted), (two, 2 * wanted), (whole, x), (turned, wanted)]:
        np.testing.assert_array_equal(np.asarray(found), np.asarray(want))


def test_a_collective_with_its_out_specs():
    mesh = mesh_of(AxisType.Auto)
    x, _ = operands(mesh, P("dp", "tp"), P())
    out = st.sharded(st.all_gather, out_specs=P("dp"))(x, "tp", axis=1)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x))
    with pytest.raises(ValueError, match="all_gather: out_specs is missing"):
        st.sharded(st.all_gather)(x, "tp", axis=1)


def test_what_is_missing_is_named():
    mesh = mesh_of(AxisType.Auto)
    x, w = operands(mesh, P("dp", "tp"), P(None, "tp"))
    call = st.sharded(st.all_gather_matmul)
    with pytest.raises(ValueError, match=r"pass in_specs, or make the mesh of .*Explicit"):
        jax.jit(lambda x, w: call(x, w, "tp"))(x, w)
    with pytest.raises(ValueError, match="mesh is missing"):
        known = st.sharded(st.all_gather_matmul, in_specs=(P("tp"), P(None, "tp")))
        jax.jit(lambda x, w: known(x, w, "tp"))(x, w)
    with pytest.raises(ValueError, match=r"lhs lies along \('dp',\).*gathered over \('tp',\)"):
        call(x, w, "tp", axis=0)
    with pytest.raises(ValueError, match="in_specs has 1 specs for 2 operands"):
        st.sharded(st.all_gather_matmul, mesh=mesh, in_specs=(P(),))(x, w, "tp")
    with pytest.raises(ValueError, match="not an operation of Stretto over a team"):
        st.sharded(st.grouped_matmul)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (P("tp", None), r"in_specs=P\('tp', None\) must be a tuple, with a spec for each of the 2"),
        (("tp", P()), r"in_specs\[0\]='tp' must be a PartitionSpec"),
        ((None, P()), r"in_specs\[0\]=None must be a PartitionSpec"),
        ((P("tp"), (P(),)), r"in_specs\[1\]=\(P\(\),\) must be a PartitionSpec or, for an operand"),
        ((P("tp", *[None] * 4), P()), "has more entries than its operand of shape"),
    ],
)
def test_specs_that_are_none_of_the_operands(specs, message):
    mesh = mesh_of(AxisType.Auto)
    x, w = operands(mesh, P("tp"), P())
    with pytest.raises(ValueError, match=message):
        st.sharded(st.all_gather_matmul, mesh=mesh, in_specs=specs)(x, w, "tp")


def test_a_tree_of_specs_and_a_number():
    mesh = mesh_of(AxisType.Auto)
    x, _ = operands(mesh, P("tp"), P())
    total = st.sharded(st.all_reduce, mesh=mesh, in_specs=({"x": P(), "one": P()},), out_specs=P())(
        {"x": x, "one": 1.0}, "tp"
    )
    np.testing.assert_array_equal(np.asarray(total["x"]), mesh.shape["tp"] * np.asarray(x))
    assert total["one"] == mesh.shape["tp"]


def test_a_mesh_that_is_none_and_operands_on_several():
    x, w = operands(mesh_of(AxisType.Auto), P("dp", "tp"), P(None, "tp"))
    with pytest.raises(ValueError, match="mesh='tp' must be a jax"):
        st.sharded(GATHER, mesh="tp")(x, w, "tp")
    other = jax.device_put(w, NamedSharding(cases.mesh_of(2, axes=("tp",)), P(None, "tp")))
    with pytest.raises(ValueError, match=r"several meshes, .*'dp': 2.* and \{'tp': 2\}; pass one"):
        st.sharded(GATHER)(x, other, "tp")


def test_a_call_inside_shard_map_is_told_so():
    mesh = mesh_of(AxisType.Auto)
    x, w = operands(mesh, P("tp"), P())
    call = st.sharded(st.all_gather_matmul)
    body = jax.shard_map(
        lambda x, w: call(x, w, "tp"), mesh=mesh, in_specs=(P("tp"), P()), out_specs=P()
    )
    with pytest.raises(ValueError, match=r"takes whole arrays, and inside jax\.shard_map"):
        jax.jit(body)(x, w)
    call = st.sharded(st.all_gather_matmul, mesh=mesh, in_specs=(P("tp"), P()))
    with pytest.raises(ValueError, match="over 'tp' encloses it; call the operation itself there"):
        jax.jit(body)(x, w)


def test_an_axis_that_the_mesh_lacks_is_named():
    mesh = mesh_of(AxisType.Auto)
    x, w = operands(mesh, P("tp"), P())
    call = st.sharded(st.all_gather_matmul, mesh=mesh, in_specs=(P("tp"), P()))
    with pytest.raises(ValueError, match=r"'model' is not among the mesh's axes \('dp', 'tp'\)"):
        call(x, w, "model")


GATHER, SCATTER, SUM = st.all_gather_matmul, st.matmul_reduce_scatter, st.matmul_all_reduce


@pytest.mark.parametrize(
    ("call", "options", "specs", "message"),
    [
        (GATHER, {}, (P("tp", "dp"), P("dp")), r"contraction of lhs lies along \('dp',\)"),
        (GATHER, {}, (P("tp"), P("dp", "tp")), r"contraction of rhs lies along \('dp',\)"),
        (GATHER, dict(gather_axis="k"), (P(None, ("dp", "tp")), P("dp")), "contraction of lhs"),
        (GATHER, dict(gather_axis="n"), (P(None, "dp"), P("dp", "tp")), "contraction of lhs"),
        (SCATTER, {}, (P(), P()), r"along \(\) in lhs and \(\) in rhs, and .* over \('tp',\)"),
        (SCATTER, {}, (P(None, ("dp", "tp")), P(("dp", "tp"))), r"along \('dp', 'tp'\) in lhs"),
        (SCATTER, dict(axis_name=("dp", "tp")),
         (P(None, ("dp", "tp")), P(("tp", "dp"))), r"\('tp', 'dp'\) in rhs"),
        (SCATTER, {}, (P("dp", "tp"), P("tp", "dp")), "result would lie along dp, whose devices"),
        (SCATTER, dict(axis=-1), (P(None, "tp"), P("tp")), "axis=-1 of lhs, which has 2 dimension"),
        (SCATTER, dict(axis=2), (P(None, "tp"), P("tp")), "axis=2 of lhs, which has 2 dimension"),
        *((SCATTER, dict(axis=axis), (P(None, "tp"), P("tp")),
           f"matmul_reduce_scatter: axis={axis} is of type") for axis in (None, 0.5)),
        (GATHER, dict(axis="m"), (P("tp"), P()), "all_gather_matmul: axis='m' is of type str"),
        (GATHER, dict(axis=3), (P("tp"), P()), "axis=3 of lhs, which has 2 dimensions"),
        (SUM, {}, ((P(None, "tp"), P(None, "tp")), P("tp")), "there are 2 lhs and 1 rhs"),
        (GATHER, {}, (P(("dp", "tp")), P(None, "dp")), "result would lie along dp, whose devices"),
        (SUM, {}, (P(), P()), "must lie along the axes of the sum in both"),
        (SUM, {}, (P("tp"), P()), "must lie along the axes of the sum in both"),
        (SUM, dict(rhs_transposed=True), (P(None, "tp"), P("tp")), "must lie along the axes"),
        (SUM, {}, ((P(None, "tp"), P()), (P("tp"), P())), "must lie along the axes of the sum"),
        (SUM, {}, ((P(None, "tp"), P("dp", "tp")), (P("tp"), P("tp"))), "they must lie alike"),
    ],
)  # fmt: skip
def test_shards_that_are_not_those_of_a_product_are_refused(call, options, specs, message):
    """Each device would compute something, and the result would be wrong."""
    x = jnp.ones((16, 16))
    given = [x if isinstance(spec, P) else (x,) * len(spec) for spec in specs]
    program = st.sharded(call, mesh=mesh_of(AxisType.Auto), in_specs=specs)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(program, **{"axis_name": "tp"} | options), *given)


def test_a_contraction_along_all_axes_of_the_sum():
    x, w = operands(mesh_of(AxisType.Auto), P(None, None, ("dp", "tp")), P(("dp", "tp")))
    for axes in (("dp", "tp"), ("tp", "dp")):
        out = st.sharded(SCATTER)(x, w, axes, axis=1)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(x) @ np.asarray(w))


def test_a_gated_epilogue_and_lists_and_operands_by_name():
    x, w = operands(mesh_of(AxisType.Auto), P("dp", "tp"), P(None, "tp"))
    call = functools.partial(st.sharded(GATHER), axis_name="tp", axis=1)
    wanted = np.asarray(x) @ np.asarray(w)
    for found in (*call(x, [w, w]), call(lhs=x, rhs=w), call(rhs=w, lhs=x)):
        np.testing.assert_array_equal(np.asarray(found), wanted)
    product = st.Epilogue(lambda gate, up: gate + up, gated=True)
    np.testing.assert_array_equal(np.asarray(call(x, (w, w), epilogue=product)), 2 * wanted)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "all_gather_matmul: missing .*'axis_name'"),
        (dict(axis_name="tp", axes=1), "unexpected keyword argument 'axes'"),
    ],
)
def test_arguments_that_the_operation_lacks(keywords, message):
    x, w = operands(mesh_of(AxisType.Auto), P("dp", "tp"), P(None, "tp"))
    with pytest.raises(TypeError, match=message):
        st.sharded(GATHER)(x, w, **keywords)


@pytest.mark.parametrize("asarray", [np.asarray, jnp.asarray])
def test_arrays_of_numpy_that_are_passed_by_name(asarray):
    """They are split as others are; a missing scale of several is one."""
    mesh = cases.mesh_of(2)
    q = asarray(cases.whole_numbers(0, 1, 8, 2, 4))
    documents = asarray(np.arange(8, dtype=np.int32).reshape(1, 8) // 3)
    attend = st.sharded(
        st.context_parallel_attention,
        mesh=mesh,
        in_specs=(P(None, "x"),) * 4,
        out_specs=P(None, "x"),
    )
    same = documents[0, :, None] == documents[0]
    np.testing.assert_allclose(
        attend(q, q, q, "x", segment_ids=documents),
        jax.nn.dot_product_attention(jnp.asarray(q), q, q, mask=same[None, None]),
        atol=1e-5,
    )
    rows = jnp.asarray(cases.whole_numbers(1, 8, 16), jnp.float8_e4m3fn)
    gather = st.sharded(st.all_gather_matmul, mesh=mesh, in_specs=(P("x"), (P("x"), P("x"))))
    scales = asarray(np.full((8, 1), 2, np.float32))
    doubled, plain = gather(
        *(rows, (rows, rows), "x"), rhs_transposed=True, rhs_scale=(scales, None)
    )
    np.testing.assert_array_equal(np.float32(doubled), 2 * np.float32(plain))
