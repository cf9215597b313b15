"""`--trace F.json`: one call's timeline, for Perfetto, and a picture of one block's.

On GPUs the kernel records it itself. Elsewhere the simulator predicts it by its cost model, which
is written into the file: a prediction is no measurement.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from stretto.benchmarks import files
from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.meshes import mesh_of
from stretto.benchmarks.errors import UnavailableError
from stretto.benchmarks.measurements.machine import is_gpu
from stretto.benchmarks.timing import programs
from stretto.benchmarks.timing.compiling import Compiler
from stretto.benchmarks.timing.operands import Operands
from stretto.distributed import simulator
from stretto.distributed.simulator.state.cost_model import CostModel
from stretto.distributed.tools import profiling
from stretto.kernels.choice import choose
from stretto.kernels.engine.architectures import TileConfig
from stretto.kernels.problem.machine import Machine

SIMULATED_BLOCKS = 4
EVENTS = 192
"""Of a warp; what they need of a block's shared memory is less than a stage of the ring."""
BLOCK_WARPS = (4, 8, 12, 16)
"""Warps that a block may have."""


@dataclasses.dataclass(frozen=True)
class Span:
    """An interval of a row of the timeline, in microseconds from the call's start."""

    row: str
    what: str
    begin: float
    end: float


def record(case: Case, path: pathlib.Path) -> str:
    """Writes the timeline of one call of the fused kernel to `path`; returns what it is, in words.

    Args:
      case: the problem.
      path: a file of trace events, as Perfetto opens.

    Raises:
      UnavailableError: the case has no fused kernel, or it left no profile.
    """
    case.check()
    mesh = mesh_of(case.devices)
    with Compiler() as compiler:
        operands = Operands(mesh, case.dtype, compiler)
        if is_gpu(mesh.devices.flat[0].platform):
            data, about = _profile(case, mesh, operands), "recorded by the kernel"
        else:
            data, about = _simulate(case, mesh, operands), "predicted by the simulator"
    data["otherData"] = {"case": str(case), "about": about}
    files.write_whole(path, json.dumps(data).encode())
    return about


def _profile(case: Case, mesh: Any, operands: Operands) -> dict[str, Any]:
    config = _with_room(case)
    candidate = Candidate(body=case.call("pallas", config), operands=case.operands)
    inputs = operands.sets(candidate, 1)[0]
    programs.run_once(candidate, mesh, inputs).block_until_ready()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with profiling.profiled(folder, events=EVENTS), warnings.catch_warnings():
            # All devices of a process write one file; the first profile stays.
            warnings.filterwarnings("ignore", message="Failed to dump profile")
            # Another function, so that the program that was run already is not taken again.
            again = dataclasses.replace(candidate, body=lambda *blocks: candidate.body(*blocks))
            programs.run_once(again, mesh, inputs).block_until_ready()
            jax.effects_barrier()
        files = sorted(folder.glob("*-trace.json"))
        if not files:
            raise UnavailableError("the kernel left no profile")
        return json.loads(files[0].read_text())


def _with_room(case: Case) -> Any:
    """The kernel's configuration less a stage of its ring, whose memory the profile gets.

    None, for the kernel's own, where it has no ring.
    """
    problem = case.problem(Machine.of_mesh())
    kernel, obstacle = choose.serving(case.operation, problem)
    if obstacle is not None:
        raise UnavailableError(obstacle)
    config = kernel.default(problem)
    for name, tiles in vars(config).items():
        if isinstance(tiles, TileConfig):
            fewer = dataclasses.replace(tiles, num_stages=tiles.num_stages - 1)
            return dataclasses.replace(config, **{name: fewer})
    return None


def _simulate(case: Case, mesh: Any, operands: Operands) -> dict[str, Any]:
    candidate = Candidate(body=case.call("simulator"), operands=case.operands)
    inputs = operands.sets(candidate, 1)[0]
    with simulator.simulate(
        trace=True,
        cost_model=CostModel(),
        core_count=SIMULATED_BLOCKS,
        detect_races=False,
        check_hardware=False,
    ) as report:
        programs.run_once(candidate, mesh, inputs).block_until_ready()
    if report.trace is None or not report.trace.events:
        raise UnavailableError("no kernel ran in the simulator")
    with tempfile.TemporaryDirectory() as name:
        saved = pathlib.Path(name) / "trace.json"
        report.trace.save(saved)
        return json.loads(saved.read_text())


def spans_of_one_block(data: dict[str, Any]) -> tuple[str, list[Span]]:
    """The first block of a timeline that did anything, and its spans, rows in order."""
    spans = _spans(data["traceEvents"])
    blocks: dict[str, list[Span]] = {}
    for block, span in spans:
        blocks.setdefault(block, []).append(span)
    if not blocks:
        return "", []
    chosen = min(blocks, key=lambda name: (-len({s.row for s in blocks[name]}), name))
    start = min(span.begin for span in blocks[chosen])
    shifted = [
        dataclasses.replace(span, begin=span.begin - start, end=span.end - start)
        for span in blocks[chosen]
    ]
    return chosen, sorted(shifted, key=lambda span: (span.row, span.begin))


def _spans(events: Sequence[dict[str, Any]]) -> list[tuple[str, Span]]:
    """Every span with its block: named by the simulator, a multiprocessor in a kernel's profile."""
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    block_warps = BLOCK_WARPS[-1] if names else _block_warps(events)
    found: list[tuple[str, Span]] = []
    open_spans: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        key = (event["pid"], event.get("tid", 0))
        row = names.get(key) or _row(*key, block_warps)
        if event["ph"] == "B":
            open_spans.setdefault(key, []).append(event)
            continue
        if event["ph"] == "E" and open_spans.get(key):
            begun = open_spans[key].pop()
            begin, end, what = begun["ts"], event["ts"], begun["name"]
        elif event["ph"] == "X":
            begin, end, what = event["ts"], event["ts"] + event["dur"], event["name"]
        else:
            continue
        block = re.search(r"(device \d+ block \d+|multiprocessor \d+) ?", row)
        if block is not None:
            rest = row.replace(block.group(0), "").strip() or "block"
            found.append((block.group(1), Span(rest, what, begin, end)))
    return found


def _row(multiprocessor: int, thread: int, block_warps: int) -> str:
    """The row of a warp in a kernel's profile, whose threads count warps over all blocks."""
    warp = (thread - 1) % block_warps
    return f"multiprocessor {multiprocessor} warpgroup {warp // 4} warp {warp % 4}"


def _block_warps(events: Sequence[dict[str, Any]]) -> int:
    """Warps of a block: so many that each multiprocessor has one block, and none has another's."""
    threads: dict[int, set[int]] = {}
    for event in events:
        threads.setdefault(event["pid"], set()).add(event.get("tid", 1) - 1)
    for warps in BLOCK_WARPS:
        blocks = [{thread // warps for thread in mine} for mine in threads.values()]
        alone = all(len(mine) == 1 for mine in blocks)
        if alone and len(set.union(*blocks, set())) == len(blocks):
            return warps
    return BLOCK_WARPS[-1]
