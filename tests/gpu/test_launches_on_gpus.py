"""Many launches: in one program, of random sizes in random order, while some device is late."""

from __future__ import annotations

import compiling
import launching
import pytest
import stress
from subjects import SUBJECTS

everywhere = pytest.mark.parametrize("name", SUBJECTS)


@pytest.mark.gpu(2)
@everywhere
def test_two_hundred_in_one_program(name, mesh, scale, tally) -> None:
    """Each with data of its own, and each verified."""
    subject = SUBJECTS[name]
    sizes = subject.sizes_of(mesh.size, *scale.middling)
    function = launching.every_one_verified(subject, mesh, sizes, backend=scale.backend)
    arguments = compiling.scalar(0), compiling.scalar(1)
    program = compiling.compile_one(function, *arguments)
    tally.launches(scale.launches, compiling.run(program, 1, scale.launches))


@pytest.mark.gpu(2)
@everywhere
def test_stress(name, mesh, scale, tally) -> None:
    """Random sizes, a random device late: on the host by up to 10 ms, inside by 200 us."""
    tally.stress(stress.stress(name, mesh, scale.plan))
