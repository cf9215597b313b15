"""Operations over two nodes, for which the halves of one host stand; run by `test_two_nodes.py`.

    stretto run -n 4 --processes-per 2 two_node_job.py pallas [OPERATION ...]

checks operations along ("x", "y"), of which "x" joins the nodes, and along "y" alone, and launches
a thousand in a row, with NCCL's collectives in flight beside kernels that wait. The first process
says at the end, as a line of JSON, what came of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import compiling
import gradient_checks
import jax
import launching
import numpy as np
import verification
from jax.sharding import Mesh
from subjects import HIERARCHICAL, SUBJECTS
from verification import Problem

import stretto.launch
from stretto.distributed import settings
from stretto.kernels.problem.node_config import Config

BOTH = ("x", "y")
LATE_US = 2000


def verified(
    names: Sequence[str], mesh: Mesh, backend: str, sizes: list, pieces: list
) -> list[verification.Outcome]:
    """The operations, over both nodes as a whole and in pieces, and within each."""
    across = [
        Problem(
            SUBJECTS[name],
            SUBJECTS[name].sizes_of(mesh.size, *mkn),
            dict(backend=backend, config=Config(pieces=count)),
            BOTH,
        )
        for name in names
        for mkn in sizes
        for count in pieces
    ]
    within = [
        Problem(
            SUBJECTS[name],
            SUBJECTS[name].sizes_of(mesh.shape["y"], *mkn),
            dict(backend=backend),
            "y",
        )
        for name in names
        for mkn in sizes
    ]
    return verification.verify(mesh, [*across, *within])


def gradients(
    names: Sequence[str], mesh: Mesh, backend: str, mkn: tuple[int, int, int]
) -> list[str]:
    """Flaws of the derivatives of the operations over both nodes."""
    flaws = []
    for name in names:
        sizes = SUBJECTS[name].sizes_of(mesh.size, *mkn)
        program = gradient_checks.gradients(name, mesh, sizes, axis=BOTH, backend=backend)
        errors = compiling.run(compiling.compile_one(program, compiling.scalar(0)), 0)
        ours, xla = errors[:, 0], errors[:, 1]
        if not (ours <= 2 * xla + 1e-3).all():
            flaws.append(f"gradients of {name}: errors {ours.max()}, XLA's {xla.max()}")
    return flaws


def launches(
    names: Sequence[str], mesh: Mesh, backend: str, mkn: tuple[int, int, int], calls: int
) -> list[str]:
    """Flaws of many launches in one program, each verified; and not, with one device late."""
    flaws = []
    for name in names:
        subject = SUBJECTS[name]
        sizes = subject.sizes_of(mesh.size, *mkn)
        options = dict(axis=BOTH, backend=backend, config=Config(pieces=2))
        programs = {
            "verified": (launching.every_one_verified(subject, mesh, sizes, **options), (1, calls)),
            "held up": (
                launching.last_one_verified(subject, mesh, sizes, **options),
                (2, calls, mesh.size - 1, LATE_US),
            ),
        }
        for kind, (program, arguments) in programs.items():
            compiled = compiling.compile_one(program, *map(compiling.scalar, arguments))
            wrong = compiling.run(compiled, *arguments)
            if wrong.any():
                flaws.append(f"{calls} launches of {name}, {kind}: wrong elements: {wrong}")
    return flaws


def main(backend: str, *names: str) -> int:
    process = stretto.launch.initialize()
    devices = np.array(jax.devices()).reshape(2, -1)
    mesh = Mesh(devices, BOTH, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rehearsed = backend != "pallas"
    sizes = [(9, 8, 24)] if rehearsed else [(65, 72, 136), (1024, 1024, 512)]
    calls = 2 if rehearsed else 1000
    names = names or HIERARCHICAL
    with settings.nodes_of(devices.shape[1]):
        outcomes = verified(names, mesh, backend, sizes, [2] if rehearsed else [1, 2])
        flaws = [f"{o.label}: {flaw}" for o in outcomes for flaw in o.flaws]
        flaws += gradients(names, mesh, backend, sizes[-1])
        flaws += launches(names, mesh, backend, (9, 8, 24) if rehearsed else (256, 512, 256), calls)
    for flaw in flaws:
        print(flaw, file=sys.stderr, flush=True)
    if process.process_id == 0:
        found = {
            "processes": process.num_processes,
            "checks": len(outcomes) + len(names) * (calls + 2),
            "launches": 2 * calls * len(names),
            "flaws": flaws,
            "ratios": [[o.label, *o.ratios] for o in outcomes],
        }
        print(json.dumps(found), flush=True)
    return 1 if flaws else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
