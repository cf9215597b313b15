"""Every shape and type: exact on whole numbers, on others at most twice as far off as XLA is."""

from __future__ import annotations

import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import subjects
import verification
from jax.sharding import PartitionSpec as P
from subjects import COLLECTIVES, SUBJECTS
from verification import Problem

from stretto.kernels.operations import OPERATIONS

# Rows x columns of a device: less than a row of 512 bytes, odd, and 16 MB.
SHAPES = [(1, 1), (3, 129), (64, 1000), (512, 4096)]
fused = pytest.mark.parametrize("name", cases.OPERATIONS)
collectives = pytest.mark.parametrize("name", COLLECTIVES)


@pytest.mark.gpu(2)
@fused
def test_model_shapes(name, mesh, scale, tally) -> None:
    subject = SUBJECTS[name]
    options = dict(backend=scale.backend)
    sizes = scale.model_shapes(subject, mesh.size)
    tally.outcomes(verification.verify(mesh, [Problem(subject, s, options) for s in sizes]))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("columns", [8, 136, 200])
@fused
def test_awkward_shapes(name, columns, mesh, scale, tally) -> None:
    """All combinations of the set's sizes; `columns` of a device's result."""
    subject = SUBJECTS[name]
    sizes = [
        s
        for s in scale.awkward_shapes(subject, mesh.size)
        if s[2] == columns * (mesh.size if name == "all_gather_matmul" else 1)
    ]
    options = dict(backend=scale.backend)
    tally.outcomes(verification.verify(mesh, [Problem(subject, s, options) for s in sizes]))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", cases.GATHERS)
def test_gathers_along_other_dimensions(name, mesh, scale, tally) -> None:
    subject = SUBJECTS[name]
    sizes = scale.gather_shapes(subject, mesh.size)
    options = dict(backend=scale.backend)
    tally.outcomes(verification.verify(mesh, [Problem(subject, s, options) for s in sizes]))


@pytest.mark.parametrize("devices", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 3)])
@pytest.mark.parametrize("kept", [False, True])
def test_shards_that_lie_side_by_side(devices, kept, scale, tally) -> None:
    """Two of them are as wide as a piece, which must not run on into the second (`windows`)."""
    name = "all_gather_matmul_k"
    lhs, rhs = cases.operands(*cases.whole(name, devices, 65, 72, 136))
    call = functools.partial(
        cases.GATHERS[name],
        axis_name="x",
        return_gathered=kept,
        out_dtype=cases.F32,
        backend=scale.backend,
    )
    in_specs, out = cases.specs(name)
    program = jax.shard_map(
        call,
        mesh=cases.mesh_of(devices),
        in_specs=in_specs,
        out_specs=(out, P()) if kept else out,
        check_vma=False,
    )
    found = jax.jit(program)(jnp.asarray(lhs, cases.BF16), jnp.asarray(rhs, cases.BF16))
    wanted = (lhs @ rhs, lhs) if kept else (lhs @ rhs,)
    for got, want in zip(jax.tree.leaves(found), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), want)
    tally.checks(len(wanted))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", [*cases.OPERATIONS, "all_gather_matmul_k"])
def test_every_config(name, mesh, scale, tally) -> None:
    """What the tuner may choose computes the same."""
    subject = SUBJECTS[name]
    configs = list(OPERATIONS[name].kernels[0].candidates(None))
    if scale.rehearsed:
        configs = configs[:1]
    sizes = subject.sizes_of(mesh.size, *scale.middling)
    problems = [
        Problem(subject, sizes, dict(backend=scale.backend, config=config)) for config in configs
    ]
    tally.outcomes(verification.verify(mesh, problems))


@pytest.mark.gpu(2)
@collectives
def test_collectives(name, mesh, scale, tally) -> None:
    m, _, n = scale.small
    shapes = [(mesh.size * m, n)] if scale.rehearsed else [(mesh.size * m, n) for m, n in SHAPES]
    subject = SUBJECTS[name]
    problems = [Problem(subject, s, dict(backend=scale.backend)) for s in shapes]
    for dtype in subjects.dtypes_of(name):
        typed = subjects.collective(name, dtype)
        sizes = typed.sizes_of(mesh.size, m, 0, n)
        problems.append(Problem(typed, sizes, dict(backend=scale.backend)))
    tally.outcomes(verification.verify(mesh, problems))
