"""Teams of other sizes, and along the axes of larger meshes."""

from __future__ import annotations

import fused_cases as cases
import jax
import numpy as np
import pytest
import verification
from jax.sharding import AxisType, Mesh
from subjects import SUBJECTS
from verification import Problem

everywhere = pytest.mark.parametrize("name", SUBJECTS)


@pytest.mark.parametrize("devices", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 3, 8)])
def test_some_of_the_devices(devices, scale, tally) -> None:
    """The first ones of the machine."""
    problems = [
        Problem(s, s.sizes_of(devices, *sizes), dict(backend=scale.backend))
        for s in SUBJECTS.values()
        for sizes in ((scale.small,) if scale.rehearsed else (scale.small, scale.middling))
    ]
    tally.outcomes(verification.verify(cases.mesh_of(devices), problems))


@pytest.mark.gpu(4)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((2, 2), "x"), ((2, 2), "y"), ((2, 2), ("x", "y")), ((1, 4), "y"), ((4, 1), ("x", "y"))],
    ids=str,
)
def test_axes_of_a_mesh(shape, axis, scale, tally) -> None:
    """Two teams at once, each with data of its own, and teams along several axes (B20)."""
    mesh = cases.mesh_of(*shape)
    team = 2 if shape == (2, 2) and isinstance(axis, str) else 4
    problems = [
        Problem(s, s.sizes_of(team, *scale.small), dict(backend=scale.backend), axis)
        for s in SUBJECTS.values()
    ]
    tally.outcomes(verification.verify(mesh, problems))


@pytest.mark.one_process
@pytest.mark.gpu(4)
@pytest.mark.parametrize("order", [[3, 2, 1, 0], [2, 0, 3, 1], [1, 2, 3]], ids=str)
def test_other_orders_are_refused_before_anything_is_launched(order, scale, tally) -> None:
    """A mesh that does not hold its devices in their own order, from the first on (B22)."""
    mesh = Mesh(np.array(jax.devices())[order], ("x",), axis_types=(AxisType.Auto,))
    problems = [
        Problem(s, s.sizes_of(len(order), *scale.small), dict(backend=scale.backend))
        for s in SUBJECTS.values()
    ]
    outcomes = verification.verify(mesh, problems)
    tally.checks(len(outcomes))
    for outcome in outcomes:
        assert "BackendUnavailableError" in outcome.flaws[0], outcome
        assert "holds its devices in the order" in outcome.flaws[0], outcome
