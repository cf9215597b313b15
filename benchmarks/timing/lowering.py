"""Traces and lowers the programs to time of one case, each kernel's configuration once."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import jax
from jax.sharding import Mesh

from stretto.benchmarks.cases import floors
from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.measurements.machine import is_gpu
from stretto.benchmarks.timing import programs
from stretto.benchmarks.timing.timers import rounds_per_run
from stretto.kernels.choice import choose, config_data
from stretto.kernels.choice.choice import Choice


@dataclasses.dataclass(frozen=True)
class Program:
    """A candidate's program before it is compiled.

    `backend` is what serves it, "pallas" or "xla"; `config` the configuration, in words or, of a
    kernel of Stretto, its fields as JSON; `out` a tree of what a call returns.
    """

    lowered: jax.stages.Lowered
    text: str
    backend: str
    config: str
    out: Any


class Lowering:
    """What lowers the candidates of `case` on `mesh`.

    Attributes:
      sets: sets of operands through which a program's calls rotate.
      rounds: times that it goes through them, in a run of about `run_us` microseconds.
      traced_s, lowered_s: seconds so far.
    """

    def __init__(self, case: Case, mesh: Mesh, run_us: float):
        on_gpu = is_gpu(mesh.devices.flat[0].platform)
        self.sets = programs.number_of_sets(case.footprint) if on_gpu else 2
        self.rounds = rounds_per_run(floors.expected_us(case), self.sets, on_gpu, run_us)
        self.traced_s = self.lowered_s = 0.0
        self._mesh = mesh
        self._fused: dict[Any, Program] = {}

    def __call__(self, candidate: Candidate, operands: list[jax.ShapeDtypeStruct]) -> Program:
        """The program of a candidate whose operands are so described."""
        began = time.monotonic()
        with choose.recorded() as choices:
            traced = programs.traced(candidate, self._mesh, operands, self.sets, self.rounds)
        self.traced_s += time.monotonic() - began
        fused = choices[0] if choices and choices[0].backend == "pallas" else None
        config = _config(candidate, fused)
        # Lowering a kernel takes a second: not again where `auto` is what another peer is.
        key = fused and (fused.config, config)
        if key is not None and key in self._fused:
            return self._fused[key]
        began = time.monotonic()
        lowered = traced.lower()
        text = lowered.as_text()
        self.lowered_s += time.monotonic() - began
        backend = "pallas" if "mosaic_gpu" in text else "xla"
        found = Program(lowered, text, backend, config, lowered.out_info[1])
        if key is not None:
            self._fused[key] = found
        return found


def _config(candidate: Candidate, fused: Choice | None) -> str:
    """What the result records as the configuration."""
    if candidate.config or fused is None:
        return candidate.config
    return json.dumps(config_data.to_data(fused.config))
