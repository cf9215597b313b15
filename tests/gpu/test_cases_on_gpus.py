"""What has gone wrong in the field, as programs with known answers."""

from __future__ import annotations

import compiling
import field_cases
import fused_cases as cases
import jax
import jax.numpy as jnp
import launching
import numpy as np
import pytest
import subjects
import verification
from jax.sharding import PartitionSpec as P
from subjects import SUBJECTS
from verification import Problem

import stretto as st

pytestmark = pytest.mark.gpu(2)


def test_programs(mesh, scale, tally) -> None:
    """All of `field_cases`, compiled side by side."""
    programs = (
        (name, subjects.on_mesh(make(mesh, scale.backend), mesh), (compiling.scalar(0),))
        for name, make in field_cases.CASES.items()
    )
    flaws = []
    for name, program in compiling.side_by_side(programs):
        if isinstance(program, Exception):
            flaws.append(f"{name}: {compiling.first_line(program)}")
        elif (wrong := compiling.run(program, 11)).any():
            flaws.append(f"{name}: wrong elements, by device: {wrong}")
    tally.checks(len(field_cases.CASES))
    tally.none(flaws)


@pytest.mark.parametrize("name", cases.OPERATIONS)
def test_sizes_about_a_thousand(name, mesh, scale, tally) -> None:
    """Where other systems change their ways (B30)."""
    sizes = [scale.small] if scale.rehearsed else [(1023, 520, 1025), (1025, 256, 1023)]
    subject = SUBJECTS[name]
    options = dict(backend=scale.backend)
    problems = [Problem(subject, subject.sizes_of(mesh.size, *s), options) for s in sizes]
    tally.outcomes(verification.verify(mesh, problems))


def test_a_thousand_launches_captured(mesh, scale, tally) -> None:
    """A loop that XLA may make a graph of (B35)."""
    subject = SUBJECTS["all_gather_matmul"]
    sizes = subject.sizes_of(mesh.size, *scale.small)
    function = launching.last_one_verified(subject, mesh, sizes, backend=scale.backend)
    program = compiling.compile_one(function, *map(compiling.scalar, (0, 1, 0, 0)))
    tally.launches(1000, compiling.run(program, 13, 3 if scale.rehearsed else 1000, 0, 0))


@pytest.mark.parametrize("state_first", [True, False])
def test_donation_and_operands_that_move(state_first, mesh, scale, tally) -> None:
    """One program, called with arrays that lie elsewhere each time, and are given up (B29, B35)."""

    def step(state, rhs):
        out = st.all_gather_matmul(state, rhs, "x", backend=scale.backend)
        return (out, rhs * 2) if state_first else (rhs * 2, out)

    rows, columns = P("x", None), P(None, "x")
    program = jax.shard_map(
        step, mesh=mesh, in_specs=(rows, columns), out_specs=(columns, columns), check_vma=False
    )
    program = jax.jit(program, donate_argnums=(0, 1))
    calls = 3 if scale.rehearsed else 20
    kept = []
    for call in range(calls):
        lhs, rhs = cases.operands(mesh.size * 64, 64, mesh.size * 64, seed=call)
        kept = [*kept[-3:], jnp.ones(1000 + 1000 * call)]
        operands = [
            jax.device_put(jnp.asarray(x, jnp.bfloat16), jax.NamedSharding(mesh, spec))
            for x, spec in ((lhs, rows), (rhs, columns))
        ]
        got = program(*operands)
        product, doubled = got if state_first else got[::-1]
        np.testing.assert_array_equal(
            np.asarray(product, np.float32), cases.rounded(lhs @ rhs, jnp.bfloat16)
        )
        np.testing.assert_array_equal(np.asarray(doubled, np.float32), 2 * rhs)
    tally.checks(calls)


def test_a_team_of_one(scale, tally) -> None:
    """It talks to nobody, and gets XLA's."""
    problems = [
        Problem(s, s.sizes_of(1, *scale.small), dict(backend=scale.backend))
        for s in SUBJECTS.values()
    ]
    tally.outcomes(verification.verify(cases.mesh_of(1), problems))
