"""Compiles kernels for H100s without one; run by `test_compiled.py` in a process of its own.

    python compile_cases.py CASE FILE

writes a JSON list to FILE, an entry for each program of the case: its label, its HLO, the fields of
its kernels, and the operations that they serve.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import compile_attention
import compile_blackwell
import compile_collectives
import compile_experts
import compile_fp8
import compile_jobs
import compile_matmuls
import compile_test_kernels
import fused_cases as cases
import subjects
from compile_experts import EXPERTS
from compile_programs import Program

from stretto.distributed.tools import aot
from stretto.kernels.choice import choose
from stretto.kernels.operations import SCALED

CASES: dict[str, Callable[[], Iterator[Program]]] = {
    **compile_matmuls.CASES,
    **compile_jobs.CASES,
    **compile_collectives.CASES,
    **compile_experts.CASES,
    **compile_attention.CASES,
    **compile_fp8.CASES,
    **compile_blackwell.CASES,
    **compile_test_kernels.CASES,
}


# The case, of those above, in which the kernel of an operation is certain to be.
COMPILED_BY: dict[str, str] = {
    **{name: f"configs of {name}" for name in cases.OPERATIONS},
    **{
        name: f"fp8, {record.public.__name__}"
        if record.examples.scales != "mx"
        else "Blackwell fp8, mx"
        for name, record in SCALED.items()
    },
    **{name: f"gathers of {name}" for name in cases.GATHERS},
    **dict.fromkeys(subjects.COLLECTIVES, "collectives"),
    "grouped_matmul": "example of grouped_matmul",
    **{name: f"example of {name}" for name in EXPERTS},
    "all_reduce_rms_norm": "sums and norms",
    "context_parallel_attention": "attention",
}


def main(case: str, file: str) -> None:
    results: list[dict[str, Any]] = []
    for label, program, structs in CASES[case]():
        with choose.recorded() as choices:
            compiled = aot.compile_program(program, *structs)
        kernels = [dataclasses.asdict(kernel) for kernel in compiled.kernels]
        served = sorted({c.problem.operation for c in choices if c.backend == "pallas"})
        results.append(dict(label=label, hlo=compiled.hlo, kernels=kernels, operations=served))
    pathlib.Path(file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
