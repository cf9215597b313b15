"""Layers of `stretto.flax` are the layers of Flax on one device, wherever they are called."""

from __future__ import annotations

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import stretto as st
import stretto.flax as sf
from stretto.kernels.choice import choose

X = np.random.default_rng(1).standard_normal((4, 8, 16), np.float32)
DEVICES = (2, 2)


def mesh_of(kind: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[:4]).reshape(DEVICES)
    return Mesh(devices, ("dp", "tp"), axis_types=(kind, kind))


class Plain(nnx.Module):
    """A feed-forward layer of `nnx.Linear`."""

    def __init__(self, rngs: nnx.Rngs, gated: bool):
        self.gate = nnx.Linear(16, 32, rngs=rngs) if gated else nnx.data(None)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gate is None:
            return self.down(jax.nn.silu(self.up(x)))
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


@functools.cache
def plain(kind: str):
    if kind != "attention":
        return Plain(nnx.Rngs(0), kind == "gated")
    return nnx.MultiHeadAttention(8, 16, num_kv_heads=4, decode=False, rngs=nnx.Rngs(0))


def ours(kind: str, **options):
    if kind == "attention":
        return sf.Attention(8, 16, num_kv_heads=4, rngs=nnx.Rngs(0), **options)
    gated = kind == "gated"
    return sf.FeedForward(16, 32, activation=jax.nn.silu, gated=gated, rngs=nnx.Rngs(0), **options)


def feed_forward(**options):
    return sf.FeedForward(16, 32, rngs=nnx.Rngs(0), **options)


def loss(model, x):
    return jnp.mean(model(x, **called(model)) ** 2)


@functools.cache
def loss_and_gradients_on_one(kind: str):
    return nnx.jit(nnx.value_and_grad(loss))(plain(kind), X)


def called(model) -> dict:
    attends = isinstance(model, sf.Attention | nnx.MultiHeadAttention)
    return {"is_causal": True} if attends else {}


def by_path(state) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(state, nnx.Param)))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def check_close(found, wanted, allowed: float) -> None:
    found, wanted = by_path(found), by_path(wanted)
    assert found.keys() == wanted.keys()
    for path, y in wanted.items():
        np.testing.assert_allclose(found[path].reshape(y.shape), y, atol=allowed, err_msg=path)


kinds = pytest.mark.parametrize("kind", ["plain", "gated", "attention"])


@kinds
def test_parameters_are_those_of_flax(kind):
    with jax.set_mesh(mesh_of()):
        model = ours(kind)
    check_close(model, plain(kind), 0)
    state = nnx.state(model, nnx.Param)
    specs = nnx.to_pure_dict(nnx.get_partition_spec(state))
    into, out_of = ("query", "out") if kind == "attention" else ("up", "down")
    assert specs[into] == {"kernel": P(None, "tp"), "bias": P("tp")}
    assert specs[out_of] == {"kernel": P("tp", None), "bias": P(None)}
    assert getattr(model, into).kernel[...].sharding.spec == P(None, "tp")


@kinds
@pytest.mark.parametrize(
    ("types", "sequence_parallel"),
    [
        (AxisType.Auto, True),
        pytest.param(AxisType.Explicit, True, marks=pytest.mark.slow),
        pytest.param(AxisType.Auto, False, marks=pytest.mark.slow),
        (AxisType.Explicit, False),
    ],
)
def test_loss_and_gradients_of_whole_arrays(kind, types, sequence_parallel):
    wanted = loss_and_gradients_on_one(kind)
    how = sf.Parallel("tp", batch_axes="dp", sequence_parallel=sequence_parallel)
    with jax.set_mesh(mesh_of(types)):
        found = nnx.jit(nnx.value_and_grad(loss))(ours(kind, parallel=how), X)
    assert found[0] == pytest.approx(float(wanted[0]), rel=1e-5)
    check_close(found[1], wanted[1], 1e-6)


@pytest.mark.parametrize("axis_names", [{"dp", "tp"}, {"tp"}, {"dp"}])
def test_inside_shard_map(axis_names):
    """Of all axes, with "dp" left to the compiler, and with "tp" left to the layer.

    An enclosing `shard_map` over "dp" has split the batch already.
    """
    model = ours("gated", parallel=sf.Parallel(mesh=mesh_of(), batch_axes="dp"))
    graph, state = nnx.split(model)
    tokens = P(*(name if name in axis_names else None for name in ("dp", "tp")))
    specs = nnx.get_partition_spec(state) if "tp" in axis_names else P()
    run = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x),
        mesh=mesh_of(),
        in_specs=(specs, tokens),
        out_specs=tokens,
        axis_names=axis_names,
        check_vma=axis_names != {"dp"},
    )
    np.testing.assert_allclose(jax.jit(run)(state, X), plain("gated")(X), atol=1e-5)


def test_rows_of_sequences_and_a_mask():
    mask = jnp.asarray(np.random.default_rng(0).random((4, 1, 8, 8)) < 0.5) | jnp.eye(8, dtype=bool)
    masked = nnx.jit(lambda model, mask: model(X, mask=mask))
    wanted = masked(plain("attention"), mask)
    how = sf.Parallel("tp", batch_axes="dp")
    with jax.set_mesh(mesh_of()):
        model = ours("attention", parallel=how)
        np.testing.assert_allclose(masked(model, mask), wanted, atol=1e-5)
        of_rows = nnx.jit(lambda model: model(X.reshape(-1, 16), is_causal=True, sequence=8))
        rows = of_rows(model)
    wanted = masked(plain("attention"), nnx.make_causal_mask(X[..., 0]))
    np.testing.assert_allclose(rows.reshape(X.shape), wanted, atol=1e-5)


def test_the_fused_operations_are_reached():
    """One kernel gathers for gate and up, another scatters; they are simulated, and right."""
    how = sf.Parallel("tp", batch_axes="dp", token_axis=0, keep_gathered=True)
    with jax.set_mesh(mesh_of()), st.simulate(seed=0) as report, choose.recorded() as choices:
        model = ours("gated", parallel=how, dtype=jnp.bfloat16, use_bias=False)
        rows = X.reshape(-1, 16).astype(jnp.bfloat16)
        out = nnx.jit(lambda model, x: model(x))(model, rows)
    names = [(choice.problem.operation, choice.backend) for choice in choices]
    assert names == [("all_gather_matmul", "simulator"), ("matmul_reduce_scatter", "simulator")]
    assert report.launches == 2
    with jax.set_mesh(mesh_of()):
        exact = ours("gated", use_bias=False, parallel=sf.Parallel(batch_axes="dp", backend="xla"))
        reference = np.asarray(exact(X)).reshape(-1, 16)
    assert np.abs(np.asarray(out, np.float32) - reference).max() < 0.03 * np.abs(reference).max()


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_biases_are_added_once(sequence_parallel):
    """Also that of the last product, which all devices of the team have."""
    drawn = nnx.initializers.normal(1.0)
    how = sf.Parallel("tp", batch_axes="dp", sequence_parallel=sequence_parallel)
    one = Plain(nnx.Rngs(0), False)
    with jax.set_mesh(mesh_of()):
        model = ours("plain", parallel=how, bias_init=drawn)
        for layer in ("up", "down"):
            bias = np.asarray(getattr(model, layer).bias[...])
            assert np.abs(bias).max() > 0.5
            getattr(one, layer).bias[...] = bias
        found = nnx.jit(nnx.value_and_grad(loss))(model, X)
    wanted = nnx.jit(nnx.value_and_grad(loss))(one, X)
    assert found[0] == pytest.approx(float(wanted[0]), rel=1e-5)
    check_close(found[1], wanted[1], 1e-6)


def test_the_kernel_adds_a_bias_to_the_product():
    how = sf.Parallel("tp", batch_axes="dp", token_axis=0)
    rows = X.reshape(-1, 16).astype(jnp.bfloat16)
    with jax.set_mesh(mesh_of()), st.simulate(seed=0):
        model = ours("plain", parallel=how, dtype=jnp.bfloat16)
        said = [st.explain(layer, x).reason for layer, x in ((model.up, rows), (model, rows))]
    assert all("the kernel applies the epilogue to the product in registers" in x for x in said)


def test_names_of_logical_axes():
    rules = [("embed", None), ("mlp", "tp")]
    with jax.set_mesh(mesh_of()), logical_axis_rules(rules):
        named = {"out_sharding": ("embed", "mlp")}
        layer = sf.ColumnParallelLinear(16, 32, kernel_metadata=named, rngs=nnx.Rngs(0))
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        other = sf.ColumnParallelLinear(16, 32, kernel_init=init, rngs=nnx.Rngs(0))
        for linear in (layer, other):
            assert linear.kernel.out_sharding == ("embed", "mlp")
            assert linear.kernel[...].sharding.spec == P(None, "tp")
            np.testing.assert_allclose(
                linear(X), nnx.Linear(16, 32, rngs=nnx.Rngs(0))(X), atol=1e-5
            )


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_types_are_those_of_flax(dtype):
    options = dict(dtype=dtype, param_dtype=jnp.float16, use_bias=False, rngs=nnx.Rngs(0))
    wanted = nnx.Linear(16, 32, **options)
    with jax.set_mesh(mesh_of()):
        layer = sf.ColumnParallelLinear(16, 32, **options)
        assert layer.kernel[...].dtype == jnp.float16 and layer.bias is None
        assert layer(X).dtype == wanted(X).dtype


def trained(model, steps: int) -> tuple[list[float], nnx.Optimizer]:
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    return [float(step(model, optimizer, X)) for _ in range(steps)], optimizer


def test_training_and_a_checkpoint(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    wanted, _ = trained(Plain(nnx.Rngs(0), True), 8)
    with jax.set_mesh(mesh_of()):
        model = ours("gated", parallel=sf.Parallel(batch_axes="dp"))
        found, optimizer = trained(model, 8)
        moments = nnx.state(optimizer)["opt_state"][0]["mu"]["up"]["kernel"]
        assert moments[...].sharding.spec == P(None, "tp")
        state = nnx.state(model)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
    assert found == pytest.approx(wanted, rel=1e-4)
    assert found[-1] < found[0] / 2
    wider = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("dp", "tp"))
    with jax.set_mesh(wider):
        other = ours("gated", parallel=sf.Parallel(batch_axes="dp"))
        with ocp.StandardCheckpointer() as checkpointer:
            nnx.update(other, checkpointer.restore(tmp_path / "state", nnx.state(other)))
        assert other.up.kernel[...].addressable_shards[0].data.shape == (16, 8)
    check_close(other, model, 0)


def test_without_a_mesh_it_is_a_layer_of_one_device():
    with nnx.use_eager_sharding(False):
        model = ours("gated")
    np.testing.assert_allclose(jax.jit(model)(X), plain("gated")(X), atol=1e-5)
    with nnx.use_eager_sharding(False), pytest.raises(ValueError, match="needs a mesh"):
        ours("plain", parallel=sf.Parallel(backend="pallas"))(X)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sf.Parallel(()), "axis_name=.* is empty"),
        (lambda: sf.Parallel("tp", batch_axes="tp"), "name an axis twice"),
        (lambda: sf.Parallel(backend="no"), "backend='no'"),
        (lambda: ours("plain")(X[:, :7]), r"dimension 1 of an operand \(4, 7, 16\) must be"),
        (lambda: ours("plain")(X[0, 0]), "token_axis=-2 must be a dimension"),
        (lambda: ours("plain", parallel=sf.Parallel(batch_axes="x"))(X), "names .'x'., and the"),
        (lambda: ours("attention")(X[0]), "pass .batch, tokens, features."),
        (lambda: ours("attention")(X[0], sequence=3), "sequence=3 must divide the 8 rows"),
        (lambda: ours("attention")(X[0], sequence=0), "sequence=0 must be at least 1"),
        (lambda: ours("attention")(X[0], sequence=4.0), "sequence=4.0 is of type float"),
        (lambda: ours("plain", parallel="tp"), "parallel='tp' is of type str; pass a stretto"),
        (lambda: ours("attention", parallel="tp"), "parallel='tp' is of type str"),
        (lambda: feed_forward(activation="gelu"), "activation='gelu' is of type str; pass a func"),
        (
            lambda: sf.ColumnParallelLinear(16, 33, rngs=nnx.Rngs(0)),
            "ColumnParallelLinear: out_features=33 must be a multiple of the team's 2 devices along"
            " 'tp'; pass 32, or",
        ),
        (lambda: sf.RowParallelLinear(1, 16, rngs=nnx.Rngs(0)), "in_features=1 .* pass 2, or"),
        (lambda: sf.FeedForward(16, 31, rngs=nnx.Rngs(0)), "out_features=31 must be a multiple"),
        (lambda: sf.Attention(4, 16, num_kv_heads=3, rngs=nnx.Rngs(0)), "num_heads=4 must be"),
        (lambda: sf.Attention(3, 16, rngs=nnx.Rngs(0)), "qkv_features=16 must be"),
        (lambda: sf.Attention(4, 16, num_kv_heads=1, rngs=nnx.Rngs(0))(X), "num_kv_heads=1 must"),
        (lambda: sf.Attention(0, 16, rngs=nnx.Rngs(0)), "num_heads=0 must be at least 1"),
        (lambda: sf.Attention(4, 16, num_kv_heads=0, rngs=nnx.Rngs(0)), "num_kv_heads=0 must"),
        (lambda: sf.Attention(4, 16, attention_fn=3, rngs=nnx.Rngs(0)), "attention_fn=3 is of"),
        (lambda: sf.FeedForward(16, -4, rngs=nnx.Rngs(0)), "out_features=-4 must be at least 1"),
        (lambda: sf.FeedForward(16, 32.0, rngs=nnx.Rngs(0)), "out_features=32.0 is of type float"),
        (lambda: ours("plain")([[1.0]]), "x=.* is of type list; it must be an array"),
        (lambda: ours("attention")([[1.0]]), "x=.* is of type list; it must be an array"),
    ],
)
def test_errors(call, words):
    with jax.set_mesh(mesh_of()), pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("use_bias", [False, True])
def test_an_activation_that_mixes_elements_is_refused(gated, use_bias):
    """A device would apply it to its own hidden features, and the result depend on the mesh."""
    layer = functools.partial(feed_forward, gated=gated, use_bias=use_bias)
    mixing = pytest.raises(ValueError, match="=softmax must be elementwise, and reduce_max is not")
    with jax.set_mesh(mesh_of()):
        for sequence_parallel in (True, False):
            how = sf.Parallel("tp", sequence_parallel=sequence_parallel)
            with mixing:
                layer(activation=jax.nn.softmax, parallel=how)(X)
        slopes = jnp.full(32 // DEVICES[1], 0.5)  # An array from outside fits no other shape.
        layer(activation=lambda y: jnp.where(y > 0, y, slopes * y))(X)


def test_flax_is_needed_for_the_layers_alone():
    code = "import jax, sys; sys.modules['flax'] = None; import stretto; stretto.all_gather_matmul"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport stretto.flax"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ModuleNotFoundError: stretto.flax needs Flax" in done.stderr
    assert "pip install 'flax>=0.12'" in done.stderr
