"""The fused matmuls on GPUs: every shape, many launches, slow devices, gradients."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import fused_cases as cases
import fused_checks as checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_peers

from stretto.benchmarks.shapes import SETS

LARGEST = 8192  # rows of the whole problem
MIDDLING = (2048, 1024, 2048)
# m_shard x k x n_shard of a device: every size of the set "awkward", every pair of k and n.
AWKWARD = [
    (1, 8, 8),
    (63, 72, 136),
    (65, 4104, 200),
    (1000, 8, 136),
    (4091, 72, 200),
    (63, 8, 200),
    (65, 72, 8),
    (1000, 4104, 136),
]
everywhere = pytest.mark.parametrize("name", cases.OPERATIONS)


def shapes_of(set_name: str, name: str, devices: int) -> list[checks.Sizes]:
    shapes = SETS[set_name](name, devices)
    return [(s.m, s.k, s.n) for s in shapes if s.m <= LARGEST and max(s.k, s.n) < 32768]


def assert_verified(
    name: str, devices: int, shapes: list[checks.Sizes], configs: Sequence[object] = (None,)
) -> None:
    assert shapes
    problems = [(s, dict(backend="pallas", config=c)) for s in shapes for c in configs]
    found = checks.verify(name, cases.mesh_of(devices), problems)
    assert not found, "\n".join(found)


@pytest.mark.gpu(4)
@pytest.mark.parametrize("set_name", ["square", "llama-70b"])
@everywhere
def test_model_shapes(name: str, set_name: str) -> None:
    """Exact on whole numbers, on others at most twice as far off as XLA is."""
    assert_verified(name, 4, shapes_of(set_name, name, 4))


@pytest.mark.gpu(4)
@everywhere
def test_awkward_shapes(name: str) -> None:
    assert_verified(name, 4, [cases.whole(name, 4, *sizes) for sizes in AWKWARD])


@pytest.mark.slow
@pytest.mark.gpu(4)
@everywhere
def test_all_awkward_shapes(name: str) -> None:
    assert_verified(name, 4, shapes_of("awkward", name, 4))


@pytest.mark.parametrize("devices", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 3, 8)])
@everywhere
def test_other_numbers_of_devices(name: str, devices: int) -> None:
    few = [(65, 72, 136), (1000, 4104, 200)]
    assert_verified(name, devices, [cases.whole(name, devices, *sizes) for sizes in few])


@pytest.mark.gpu(4)
@pytest.mark.parametrize("axis", ["y", ("x", "y")], ids=str)
@everywhere
def test_axes_of_a_mesh(name: str, axis: object) -> None:
    """Two teams at once along an axis of four devices, and one team along both axes."""
    mesh = cases.mesh_of(2, 2)
    lhs, rhs = cases.operands(*MIDDLING)
    program = cases.mapped(name, mesh, axis, out_dtype=jnp.float32, backend="pallas")
    out = jax.jit(program)(jnp.asarray(lhs, jnp.bfloat16), jnp.asarray(rhs, jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(out), lhs @ rhs)


@pytest.mark.gpu(4)
@pytest.mark.parametrize(
    ("calls", "delay_s"), [(200, 0.0), (24, 0.005)], ids=["two hundred", "held up by the host"]
)
@everywhere
def test_many_launches_in_one_program(name: str, calls: int, delay_s: float) -> None:
    """New data each time; in the second case one device after the other comes late."""
    program = checks.launches(
        name, cases.mesh_of(4), MIDDLING, calls=calls, delay_s=delay_s, backend="pallas"
    )
    wrong = np.asarray(jax.jit(program)(jnp.int32(0)))
    assert not wrong.any(), f"wrong elements, by device: {wrong}"


@pytest.mark.gpu(4)
@pytest.mark.parametrize("device", [0, 3])
@everywhere
def test_a_device_that_dawdles_inside_the_kernel(name: str, device: int) -> None:
    """It sleeps before each of its signals: peers wait, and nobody takes half the data."""
    with slow_peers.dawdling(device, microseconds=200):
        program = checks.launches(
            name, cases.mesh_of(4), (512, 512, 1024), calls=10, backend="pallas"
        )
        wrong = np.asarray(jax.jit(program)(jnp.int32(0)))
    assert not wrong.any(), f"wrong elements, by device: {wrong}"


@pytest.mark.gpu(4)
@everywhere
def test_gradients(name: str) -> None:
    program = checks.gradients(name, cases.mesh_of(4), MIDDLING)
    errors = np.asarray(jax.jit(program)(jnp.int32(0)))
    assert (errors[:, 0] <= 2 * errors[:, 1] + 1e-3).all(), errors


@pytest.mark.gpu(4)
@everywhere
def test_every_config(name: str) -> None:
    """What the tuner may choose computes the same."""
    configs = importlib.import_module(f"stretto.kernels.{name}").Config.candidates()
    assert_verified(name, 4, [MIDDLING], list(configs))
