"""`backend="auto"` serves whatever `lax` would: on CPUs, in the simulator, lowered for H100s.

`auto_cases` has the list of what authors write around an operation. In a simulation a kernel serves
wherever one can; where none can, XLA does, and the reason is told.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from auto_cases import CASES, SUBJECTS, Case, Subject
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.tools import aot
from stretto.kernels.choice import choose
from stretto.kernels.choice.choice import Choice

SHAPE, AXES = (2, 2), ("dp", "tp")
# A matmul with its derivatives takes seconds to simulate.
QUICK = ("plain", "axes left to the compiler", "jvp", "Hessian-vector product", "vmap outside")


def pairs(subject: str, *matmuls: str) -> list:
    """Every case of every subject; slow but for those of `subject` and of some `matmuls`."""
    found = []
    for label, case in CASES.items():
        for name in SUBJECTS:
            if case.only not in (None, name):
                continue
            quick = label in matmuls or (case.only and not case.heavy)
            gather = name == "all_gather_matmul" and quick
            marks = () if gather or name == subject else (pytest.mark.slow,)
            found.append(pytest.param(label, name, marks=marks, id=f"{name}-{label}"))
    return found


# A function that JAX has traced before makes no choice again.
pytestmark = pytest.mark.usefixtures("traces_apart")


def operands(case: Case) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = (0 if case.empty else 16, 16), (16, 16)
    return [jnp.asarray(rng.integers(-3, 4, shape), case.dtype) for shape in shapes]


def run(case: Case, call, subject: Subject) -> list[np.ndarray]:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(SHAPE), AXES)
    program = case.make(call, subject, mesh)
    # What is exported has to be whole.
    program = program if case is CASES["export"] else jax.jit(program)
    wide = np.complex64 if case.dtype == jnp.complex64 else np.float32
    return [np.asarray(out).astype(wide) for out in jax.tree.leaves(program(*operands(case)))]


def check(label: str, name: str, *, simulated: bool) -> None:
    case, subject = CASES[label], SUBJECTS[name]
    wanted = run(case, subject.plain, subject)
    with contextlib.ExitStack() as stack:
        if simulated:
            stack.enter_context(st.simulate(seed=0))
        choices = stack.enter_context(choose.recorded())
        found = run(case, subject.call, subject)
    check_choice(case, choices, "simulator" if simulated else "xla")
    # A term that the kernel rounds once and XLA twice may cancel others. A result in few bits is
    # another of its type's numbers then.
    is_rounded = jnp.issubdtype(case.dtype, jnp.inexact)
    tolerance = max(0.03, float(jnp.finfo(case.dtype).eps)) if is_rounded else 0.03
    for got, want in zip(found, wanted, strict=True):
        largest = np.abs(want).max(initial=1)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=0.03 * largest)


def check_choice(case: Case, choices: list[Choice], served_by: str) -> None:
    if case.reason is not None:
        assert choices[0].backend == "xla"
        assert case.reason in choices[0].reason
    elif choices[0].backend != served_by:
        assert choices[0].backend == "xla"
        assert "the kernel " in choices[0].reason or "empty" in choices[0].reason
    elif case.said is not None and served_by != "xla":
        assert "XLA applies the epilogue to the kernel's product: the epilogue" in choices[0].reason
        assert case.said in choices[0].reason


@pytest.mark.parametrize(("label", "name"), pairs("all_gather_matmul"))
def test_on_cpus(label: str, name: str) -> None:
    check(label, name, simulated=False)


@pytest.mark.parametrize(("label", "name"), pairs("all_reduce", *QUICK))
def test_simulated(label: str, name: str) -> None:
    check(label, name, simulated=True)


@pytest.mark.skipif(not aot.is_available(), reason="needs the compiler: `uv sync --group aot`")
@pytest.mark.parametrize(("label", "name"), pairs("", *QUICK[:3]))
def test_lowered_for_gpus(label: str, name: str) -> None:
    """Large enough that a kernel is chosen where one can serve."""
    case, subject = CASES[label], SUBJECTS[name]
    mesh = aot.mesh_of_gpus(SHAPE, AXES)
    size, everywhere = 16384, NamedSharding(mesh, P())
    structs = [
        jax.ShapeDtypeStruct((rows, size), case.dtype, sharding=everywhere)
        for rows in (0 if case.empty else size, size)
    ]
    with choose.recorded() as choices:
        lowered = jax.jit(case.make(subject.call, subject, mesh)).lower(*structs)
    check_choice(case, choices, "pallas")
    fused = any(choice.backend == "pallas" for choice in choices)
    assert ("mosaic_gpu" in lowered.as_text()) == fused


def test_derivatives_in_one_program() -> None:
    """A Hessian-vector product runs the first derivative's kernels, and XLA's for the second."""
    subject, mesh = SUBJECTS["all_gather_matmul"], Mesh(np.array(jax.devices()[:2]), ("tp",))
    case = CASES["Hessian-vector product"]
    with st.simulate(seed=0) as report:
        jax.block_until_ready(jax.jit(case.make(subject.call, subject, mesh))(*operands(case)))
    # The gather, and of the gradient a scatter and a gather, which is linear: its tangent, too.
    assert report.launches == 4
