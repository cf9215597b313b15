"""The numbers themselves: against NumPy, against the simulator, and through derivatives."""

from __future__ import annotations

import compiling
import fused_cases as cases
import gradient_checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import subjects
from jax import lax
from subjects import SUBJECTS

import stretto as st


@pytest.mark.gpu(2)
def test_the_oracle_is_right(mesh, scale, tally) -> None:
    """What other tests compare with, beside NumPy in float64."""
    m, k, n = scale.middling

    def body(seed):
        found = {}
        for name in cases.OPERATIONS:
            subject = SUBJECTS[name]
            shapes = subject.shapes(mesh.size, subject.sizes_of(mesh.size, m // 4, k, n // 4))
            operands = subject.draw(subjects.own_key(seed, mesh), shapes, whole=False)
            found[name] = (*operands, subject.exact(operands, "x"))
        return found

    program = compiling.compile_one(subjects.on_mesh(body, mesh), compiling.scalar(0))
    for name, parts in compiling.run(program, 5).items():
        lhs, rhs, out = (np.asarray(x, np.float64) for x in parts)
        gathers = name == "all_gather_matmul"
        lhs = np.concatenate(lhs, axis=0 if gathers else 1)
        rhs = np.concatenate(rhs, axis=1 if gathers else 0)
        want = lhs @ rhs
        if gathers:
            want = np.split(want, mesh.size, axis=1)
        elif name == "matmul_reduce_scatter":
            want = np.split(want, mesh.size)
        else:
            want = [want] * mesh.size
        np.testing.assert_allclose(out, np.stack(want), rtol=1e-5, atol=2e-4, err_msg=name)
    tally.checks(len(cases.OPERATIONS))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", cases.FORMS)
def test_gradients(name, mesh, scale, tally) -> None:
    """At most twice as far off as XLA's."""
    sizes = SUBJECTS[name].sizes_of(mesh.size, *scale.middling)
    program = compiling.compile_one(
        gradient_checks.gradients(name, mesh, sizes), compiling.scalar(0)
    )
    errors = compiling.run(program, 7)
    tally.checks(2)
    assert (errors[:, 0] <= 2 * errors[:, 1] + 1e-3).all(), errors


def _results(devices: list[jax.Device], arguments: dict[str, list[np.ndarray]], backend: str):
    """What every operation makes of its operands, stacked by device: `{name: [device, ...]}`."""
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))

    def body(arguments):
        return {
            name: lax.all_gather(
                SUBJECTS[name].call([x[0] for x in operands], "x", backend=backend), "x"
            )
            for name, operands in arguments.items()
        }

    program = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=jax.P("x"),
        out_specs=jax.P(),
        check_vma=False,
    )
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    placed = jax.tree.map(lambda x: jax.device_put(x, sharding), arguments)
    outs = compiling.compile_one(program, placed)(placed)
    return {name: np.asarray(out, np.float32) for name, out in outs.items()}


@pytest.mark.one_process
@pytest.mark.gpu(2)
def test_the_simulator_gives_the_same(mesh, rehearsing, tally) -> None:
    """Every operation, on the same operands, to a rounding of bfloat16."""
    rng = np.random.default_rng(8)
    sizes = {name: s.sizes_of(mesh.size, 64, 128, 128) for name, s in SUBJECTS.items()}
    arguments = {
        name: [
            rng.standard_normal((mesh.size, *shape)).astype(jnp.bfloat16)
            for shape in SUBJECTS[name].shapes(mesh.size, sizes[name])
        ]
        for name in SUBJECTS
    }
    got = _results(list(mesh.devices.flat), arguments, "xla" if rehearsing else "pallas")
    with st.simulate(seed=1, core_count=4, detect_races=False) as report:
        want = _results(jax.devices("cpu")[: mesh.size], arguments, "pallas")
    assert report.launches == len(SUBJECTS)
    tally.checks(len(SUBJECTS))
    for name in SUBJECTS:
        # The order of a sum may differ, so a result may be rounded the other way.
        largest = np.abs(want[name]).max()
        np.testing.assert_allclose(
            got[name], want[name], rtol=2**-7, atol=2**-8 * largest, err_msg=name
        )
