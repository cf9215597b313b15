"""Runs test files of JAX's own in the simulator, and writes a table of what came of them.

The files are not part of this project. Get JAX's sources of the installed version, and:

    uv run python tests/jax_files/run.py JAX/tests/pallas
    uv run python tests/jax_files/run.py JAX/tests/pallas --part 0/3 --out part0.jsonl
    uv run python tests/jax_files/run.py JAX/tests/pallas --target b200 --only TCGen05
    uv run python tests/jax_files/run.py --read part0.jsonl part1.jsonl part2.jsonl

With `--target b200` the tests find a B200, and those of its tensor cores run. The last prints the
table from what parts have written. Nothing is changed in JAX's sources; what the simulator puts in
the place of a GPU is in `stand_in.py`, and `outcomes.py` says what counts as what.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from outcomes import CLASSES, OF_JAX, OTHER_JAX, REFUSED, RIGHT, Outcome, count

HERE = Path(__file__).parent
# Each with the number of devices that it runs on: the race tests insist on one.
FILES = {
    "gpu_pallas_distributed_test.py": 8,
    "mosaic_gpu_test.py": 1,
    "gpu_pallas_interpret_race_detection_test.py": 1,
    "gpu_pallas_interpret_cluster_barrier_test.py": 1,
    "gpu_pallas_interpret_distributed_test.py": 8,
    "gpu_pallas_interpret_test.py": 1,
}
# Named one by one below the table; of the others a number is enough.
NAMED = [kind for kind in CLASSES if kind not in (RIGHT, REFUSED, OF_JAX, OTHER_JAX)]
WORKER_LIMIT_S = 3600


def run_file(path: Path, devices: int, target: str, part: str, pattern: str) -> list[Outcome]:
    """Runs a part, as "0/3", of the tests of a file in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "outcomes.jsonl")
        command = [sys.executable, str(HERE / "worker.py"), str(path), str(devices), target]
        done = subprocess.run(
            [*command, *part.split("/"), pattern, str(out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WORKER_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{path.name}: the worker ended with {done.returncode}\n{done.stderr}")
        return [_outcome(json.loads(line)) for line in out.read_text().splitlines()]


def _outcome(fields: dict) -> Outcome:
    return Outcome(**{**fields, "findings": tuple(fields["findings"])})


def table(results: dict[str, list[Outcome]]) -> str:
    """The table in markdown, and beneath it what is behind its numbers."""
    head = ["file", "cases", *CLASSES]
    rows = []
    for file, outcomes in results.items():
        counts = count(outcomes)
        numbers = [sum(counts.values()), *(counts[kind] or "" for kind in CLASSES)]
        rows.append([f"`{file.removesuffix('.py')}`", *map(str, numbers)])
    rule = ["---", *["---:"] * (len(head) - 1)]
    lines = ["| " + " | ".join(row) + " |" for row in (head, rule, *rows)]
    for kind, meaning in CLASSES.items():
        lines += ["", f"**{kind}**: {meaning}"]
        lines += _details(kind, results)
    return "\n".join(lines)


def _details(kind: str, results: dict[str, list[Outcome]]) -> list[str]:
    """Of the refused ones the reasons; of those that need a look, which they are."""
    found: collections.Counter[str] = collections.Counter()
    for outcome in (o for outcomes in results.values() for o in outcomes if not o.skipped):
        if outcome.kind == kind and (kind == REFUSED or kind in NAMED):
            name = re.sub(r"(_[xyz]+=[\w=]*|\d+)?( .*)?$", "", outcome.test)
            found[outcome.reason if kind == REFUSED else f"{name}: {outcome.reason}"] += 1
    return [f"- {number} x {what}" for what, number in found.most_common()]


def main() -> None:
    """Runs what the command line says, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="JAX's tests/pallas")
    parser.add_argument("--files", nargs="+", default=list(FILES), help="of the folder")
    parser.add_argument("--target", choices=("h100", "b200"), default="h100", help="the GPU")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every Nth test, from the Ith")
    parser.add_argument("--only", default="", metavar="REGEX", help="tests with such names")
    parser.add_argument("--out", type=Path, help="where to write outcomes, for --read")
    parser.add_argument("--read", nargs="+", type=Path, help="outcomes to make the table of")
    args = parser.parse_args()
    if (args.folder is None) == (args.read is None):
        parser.error("give JAX's tests/pallas, or --read and the files that --out has written.")
    results: dict[str, list[Outcome]] = collections.defaultdict(list)
    for line in (line for path in args.read or () for line in path.read_text().splitlines()):
        entry = json.loads(line)
        results[entry.pop("file")].append(_outcome(entry))
    for file in args.files if args.folder else ():
        path = args.folder / file
        if not path.exists():
            raise SystemExit(f"{path} is not there; give the tests/pallas folder of JAX's sources.")
        results[file] = run_file(path, FILES.get(file, 1), args.target, args.part, args.only)
        seconds = sum(o.seconds for o in results[file])
        print(f"{file}: {len(results[file])} tests, {seconds:.0f} s", file=sys.stderr, flush=True)
    if args.out:
        with args.out.open("w") as out:
            for file, outcomes in results.items():
                for outcome in outcomes:
                    out.write(json.dumps({"file": file, **vars(outcome)}) + "\n")
    print(f"JAX {importlib.metadata.version('jax')}\n\n{table(results)}")


if __name__ == "__main__":
    main()
