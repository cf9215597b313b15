"""`stretto.flax.MixtureOfExperts` is the same layer wherever it is called, and on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import stretto as st
import stretto.flax as sf

EXPERTS, D, F = 8, 16, 8
X = jax.random.normal(jax.random.key(1), (4, 8, D))
SCORES = jax.nn.softmax(2 * jax.random.normal(jax.random.key(2), (4, 8, EXPERTS)))


def mesh_of(kind: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return Mesh(devices, ("dp", "ep"), axis_types=(kind, kind))


def ours(**options):
    return sf.MixtureOfExperts(EXPERTS, D, F, top_k=2, rngs=nnx.Rngs(0), **options)


def plain(weights, x, scores, normalised=True):
    """Every expert on every token."""
    chosen = scores >= jnp.sort(scores)[..., -2, None]
    share = jnp.where(chosen, scores, 0)
    share = share / share.sum(-1, keepdims=True) if normalised else share
    gate, up, down = (weights[name] for name in ("gate", "up", "down"))
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate))
    hidden = hidden * jnp.einsum("btd,edf->btef", x, up)
    return jnp.einsum("btef,efd,bte->btd", hidden, down, share), chosen.sum((0, 1))


def weights_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@pytest.fixture(scope="module")
def alone():
    """Weights, out, load and gradients on one device."""
    with nnx.use_eager_sharding(False):
        weights = weights_of(ours())
    out, load = plain(weights, X, SCORES)
    loss = lambda *given: jnp.mean(plain(*given)[0] ** 2)  # noqa: E731
    return weights, out, load, jax.jit(jax.grad(loss, (0, 2)))(weights, X, SCORES)


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("team", ["ep", pytest.param(("dp", "ep"), marks=pytest.mark.slow)])
def test_global_view(alone, kind, team):
    """Result, load of all tokens, and gradients by weights and scores, beside "dp" or over it."""
    _, out, load, gradients = alone
    how = sf.Parallel(team, batch_axes="dp" if team == "ep" else ())
    with jax.set_mesh(mesh_of(kind)):
        model = ours(parallel=how)
        axes = team if isinstance(team, tuple) else (team,)
        assert model.up[...].sharding.spec[0] in (team, axes)

        def loss(model, scores):
            found = model(X, scores)
            return jnp.mean(found[0] ** 2), found

        run = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, found), (by_weights, by_scores) = run(model, SCORES)
    np.testing.assert_allclose(found[0], out, atol=1e-5)
    np.testing.assert_array_equal(found[1], load)
    np.testing.assert_allclose(by_scores, gradients[1], atol=1e-6)
    for name, bar in nnx.to_pure_dict(by_weights).items():
        np.testing.assert_allclose(bar, gradients[0][name], atol=1e-6, err_msg=name)


def test_without_a_mesh_it_is_a_layer_of_one_device(alone):
    with nnx.use_eager_sharding(False):
        model = ours(normalised=False)
    out, load = jax.jit(lambda x, scores: model(x, scores))(X, SCORES)
    np.testing.assert_allclose(out, plain(alone[0], X, SCORES, normalised=False)[0], atol=1e-5)
    np.testing.assert_array_equal(load, alone[2])


@pytest.mark.slow
def test_kernels_inside_shard_map_in_the_simulator():
    mesh = Mesh(np.array(jax.devices()[:2]), ("ep",))
    x, scores = X.astype(jnp.bfloat16), SCORES
    model = ours(parallel=sf.Parallel("ep", mesh=mesh), param_dtype=jnp.bfloat16)
    graph, state = nnx.split(model)
    rows = P(None, "ep")
    run = jax.shard_map(
        lambda state, x, scores: nnx.merge(graph, state)(x, scores),
        mesh=mesh,
        in_specs=(nnx.get_partition_spec(state), rows, rows),
        out_specs=(rows, P()),
        check_vma=False,
    )
    wanted = jax.jit(run)(state, x, scores)
    with st.simulate(core_count=2) as report:
        found = jax.tree.map(np.asarray, jax.jit(run)(state, x, scores))
    assert report.ok, str(report)
    assert report.launches == 2 + 2  # Gate and up are one product, with the activation in it.
    np.testing.assert_allclose(
        found[0].astype(np.float32), np.asarray(wanted[0], np.float32), atol=0.05
    )
    np.testing.assert_array_equal(found[1], wanted[1])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sf.MixtureOfExperts(4, D, F, top_k=5, rngs=nnx.Rngs(0)), "top_k=5 must be from"),
        (lambda: sf.MixtureOfExperts(4, D, F, top_k=0, rngs=nnx.Rngs(0)), "top_k=0 must be at le"),
        (lambda: sf.MixtureOfExperts(4, D, F, top_k=2.0, rngs=nnx.Rngs(0)), "top_k=2.0 is of type"),
        (
            lambda: sf.MixtureOfExperts(
                3, D, F, top_k=2, parallel=sf.Parallel("ep"), rngs=nnx.Rngs(0)
            ),
            "num_experts=3 must be a multiple of the team's",
        ),
        (lambda: ours(parallel=sf.Parallel("ep"))(X, [1.0]), "scores=.* is of type list"),
        (lambda: ours(parallel=sf.Parallel("ep", sequence_parallel=False)), "sequence_parallel"),
        (lambda: ours(parallel=sf.Parallel("ep"))(X, SCORES[..., :3]), "scores has shape"),
        (lambda: ours(parallel=sf.Parallel("ep"))(X[:, :7], SCORES[:, :7]), "must be a multiple"),
    ],
)
def test_errors(call, words):
    with jax.set_mesh(mesh_of()), pytest.raises(ValueError, match=words):
        call()


def test_experts_in_8_bits(alone):
    """`Parallel(fp8=)`: gradients nearly those of the same weights without it."""
    how = sf.Parallel("ep", batch_axes="dp", fp8=st.fp8.Recipe())
    with jax.set_mesh(mesh_of()):
        model = ours(parallel=how)
        bars = nnx.jit(nnx.grad(lambda m: jnp.mean(m(X, SCORES)[0] ** 2)))(model)
    for name, bar in nnx.to_pure_dict(bars).items():
        want = alone[3][0][name]
        error = float(jnp.linalg.norm(bar - want) / jnp.linalg.norm(want))
        assert 1e-4 < error < 0.15, name


def test_names_of_activations():
    with nnx.use_eager_sharding(False):
        assert ours(activation="gelu").activation is jax.nn.gelu
        for wrong in ("swiglu", 3):
            with pytest.raises(ValueError, match=f"MixtureOfExperts: activation={wrong!r} is"):
                ours(activation=wrong)
