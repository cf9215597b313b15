"""A job's checks, the same in every layout of processes; run by `test_layouts_on_gpus.py`.

    stretto run -n 4 --processes-per gpu layout_job.py pallas
    stretto run -n 4 --processes-per node layout_job.py pallas
    stretto run -n 4 --devices-per-gpu 4 layout_job.py pallas briefly

Every process checks all that it can see. Process 0 says at the end, as a line of JSON, what came of
it: flaws, counts, the errors over XLA's, and checksums of the results, which all layouts share.
"""

from __future__ import annotations

import json
import sys

import compiling
import fused_cases as cases
import jax
import launching
import numpy as np
import stress
import verification
from subjects import SUBJECTS
from verification import Problem

import stretto.launch
from stretto.launch.process.startup import Process


def verified(mesh: jax.sharding.Mesh, backend: str, sizes: list) -> list[verification.Outcome]:
    problems = [
        Problem(s, s.sizes_of(mesh.size, *mkn), dict(backend=backend))
        for s in SUBJECTS.values()
        for mkn in sizes
    ]
    return verification.verify(mesh, problems)


def unequal_histories(
    process: Process, mesh: jax.sharding.Mesh, backend: str, calls: int
) -> list[str]:
    """Process 0 takes and frees memory of random sizes between calls, the others do not (B28)."""
    subject = SUBJECTS["all_gather_matmul"]
    sizes = subject.sizes_of(mesh.size, 64, 128, 128)
    program = jax.jit(launching.every_one_verified(subject, mesh, sizes, backend=backend))
    rng = np.random.default_rng(9)
    kept = []
    for call in range(calls):
        if process.process_id == 0:
            kept = [*kept[-3:], jax.device_put(np.zeros(rng.integers(1, 2**22), np.int8))]
        wrong = compiling.run(program, call, 1)
        if wrong.any():
            return [f"call {call} after unequal allocations: wrong elements: {wrong}"]
    return []


def main(backend: str, briefly: str = "") -> int:
    process = stretto.launch.initialize()
    mesh = cases.mesh_of(len(jax.devices()))
    rehearsed = backend != "pallas"
    sizes = [(9, 8, 24)] if rehearsed else [(65, 72, 136), (512, 1024, 512)]
    outcomes = verified(mesh, backend, sizes)
    flaws = [f"{o.label}: {flaw}" for o in outcomes for flaw in o.flaws]
    if not rehearsed:
        plan = stress.Plan(seed=1, sizes=2, rounds=10, unverified=40)
        if briefly:  # Where processes take turns on a GPU, a launch takes milliseconds.
            plan = stress.Plan(seed=1, sizes=1, rounds=3, unverified=10)
        for name in SUBJECTS:
            flaws += stress.stress(name, mesh, plan).flaws
    calls = 5 if rehearsed or briefly else 100
    flaws += unequal_histories(process, mesh, backend, calls)
    for flaw in flaws:
        print(flaw, file=sys.stderr, flush=True)
    if process.process_id == 0:
        found = {
            "processes": process.num_processes,
            "checks": len(outcomes) + calls,
            "flaws": flaws,
            "ratios": [[o.label, *o.ratios] for o in outcomes],
            # Rehearsed, XLA's sums of normal numbers depend on the layout.
            "bits": {o.label: o.checksums[: 1 if rehearsed else 2] for o in outcomes},
        }
        print(json.dumps(found), flush=True)
    return 1 if flaws else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
