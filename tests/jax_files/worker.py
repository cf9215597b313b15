"""Runs a part of one test file of JAX's, in a process of its own: `run.py` starts it.

Usage: worker.py FILE DEVICES TARGET PART PARTS PATTERN OUT. OUT gets an outcome a line, as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import re
import sys
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
from outcomes import Outcome

# Tests that are left out, by name.
LEFT_OUT = {
    r"planar_snake": "no kernel in it, and minutes of index arithmetic",
    r"CoreMapTest.test_realistic_matmul_with_cluster": "half a million steps",
    r"PipelineSm90ATest.test_realistic_matmul": "wants all digits of a sum that XLA for CPUs adds"
    " in another order",
    r"test_while_loop_layout_mismatch": "a loop without end, which JAX refuses to lower",
}


def main(
    file: str, devices: str, target: str, part: str, parts: str, pattern: str, out: str
) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices))
    module = _imported(Path(file), target)
    tests = [t for t in _tests(module) if re.search(pattern, t.id())]
    with open(out, "w") as results:
        for test in tests[int(part) :: int(parts)]:
            if any(re.search(name, test.id()) for name in LEFT_OUT):
                continue
            results.write(json.dumps(dataclasses.asdict(_run(test, target))) + "\n")
            results.flush()


def _imported(path: Path, target: str) -> ModuleType:
    import stand_in

    stand_in.install(as_gpu="interpret" not in path.name, target=target)
    sys.path.insert(0, str(path.parent))
    sys.argv = [path.name]
    module = importlib.import_module(path.stem)
    with contextlib.suppress(ImportError):
        from absl import flags

        flags.FLAGS(sys.argv)
    stand_in.adopt(module)
    return module


def _tests(module: ModuleType) -> Iterator[unittest.TestCase]:
    """The tests of a file, but for those of warpgroup semantics, which differ in the lowering."""

    def flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
        for test in suite:
            if isinstance(test, unittest.TestSuite):
                yield from flat(test)
            else:
                yield test

    for test in flat(unittest.defaultTestLoader.loadTestsFromModule(module)):
        if "Warpgroup" not in str(getattr(test, "LOWERING_SEMANTICS", "")):
            yield test


def _run(test: unittest.TestCase, target: str) -> Outcome:
    import stand_in

    result, begin, raised = unittest.TestResult(), time.process_time(), ""
    findings: tuple[str, ...] = ()
    try:
        with stand_in.simulating(target) as report:
            test.run(result)
            findings = tuple(map(str, report.findings))
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    failures = [text for _, text in (*result.failures, *result.errors)]
    if raised and (failures or not _wants_an_error(test)):
        failures.append(raised)
    return Outcome(
        test=test.id().split(".", 1)[1],
        error="\n".join(failures),
        raised=raised.split("\n")[0],
        findings=findings,
        skipped=result.skipped[0][1] if result.skipped else "",
        seconds=time.process_time() - begin,
        asked=stand_in.was_asked(),
    )


def _wants_an_error(test: unittest.TestCase) -> bool:
    method = getattr(type(test), test.id().split(".")[-1].split(" ")[0], None)
    return method is not None and "assertRaises" in inspect.getsource(inspect.unwrap(method))


if __name__ == "__main__":
    main(*sys.argv[1:])
