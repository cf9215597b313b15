"""List the collectives of the compiled training step: which, how many, over whom, and from where.

    python examples/transformer/collectives.py --dp 2 --tp 2
    uv run --group aot python examples/transformer/collectives.py --config 7b-layer --target h100

The step is compiled for CPU devices or, with `--target`, for GPUs that need not be there: the group
`aot` holds their compiler. docs/models/tensor_parallel.md explains each line.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import config
import jax
import parallel
from jax.sharding import Mesh
from step import make_train_step, state_shapes

from stretto.distributed.tools import aot

_INSTRUCTION = re.compile(
    r" = (?P<types>.+?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    r"|custom-call)(?P<start>-start)?\(.*?op_name=\"(?P<source>[^\"]*)\""
)
_ARRAY = re.compile(r"\b[a-z]+\d+\[[\d,]*\]")
_GROUPS = re.compile(r"replica_groups=(.*?), (?=[a-z_]+=)")
_AXES = re.compile(r"'(\w+)'(?!=)")  # of a mesh['dp'=2,'tp'=2] {'tp'}
_ALONE = re.compile(r"\{(\{\d+\},?)*\}")  # every device in a group of its own


class Collective(NamedTuple):
    """One in the program, or a kernel that is one; results are a device's own."""

    where: str
    kind: str
    over: str
    results: str


def collectives(hlo: str) -> Counter[Collective]:
    """Those of an optimised program, and how often each stands in it."""
    found: Counter[Collective] = Counter()
    for line in hlo.splitlines():
        match = _INSTRUCTION.search(line)
        if match is None or (match["kind"] == "custom-call" and "mosaic_gpu" not in line):
            continue
        arrays = _ARRAY.findall(match["types"])
        if match["kind"] == "custom-call":  # the first result; others are the kernel's own
            name = match["source"].split("/")[-2]
            over = "" if name.startswith("grouped") else "dp, tp" if "expert" in name else "tp"
            kind, arrays = f"kernel {name}", arrays[:1]
        else:
            groups = _GROUPS.search(line)
            over = groups[1] if groups else ""
            if _ALONE.fullmatch(over):
                continue  # it sends nothing
            kind, over = match["kind"], ", ".join(_AXES.findall(over)) or over
            arrays = arrays[len(arrays) // 2 :] if match["start"] else arrays
        found[Collective(_place(match["source"]), kind, over, " ".join(arrays))] += 1
    return found


def _place(source: str) -> str:
    """Where in the step an instruction belongs, from the name that JAX gave it."""
    if "while/body" not in source:
        return "once"
    if "rematted_computation" in source:
        return "layer, again"
    return "layer, backward" if "transpose(" in source else "layer, forward"


def compiled_step(
    mesh: Mesh, sizes: config.Sizes, training: config.Training, how: config.Execution
) -> jax.stages.Compiled:
    """The training step, compiled for the devices of `mesh`, with nothing allocated."""
    rows = parallel.row_shapes(mesh, training.batch, sizes.sequence)
    step = make_train_step(mesh, sizes, training, how)
    return step.lower(state_shapes(mesh, sizes, training), rows, rows).compile()


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles the step and prints the table."""
    parser = argparse.ArgumentParser(description="List the collectives of the training step.")
    parser.add_argument("--config", choices=config.SIZES, default="tiny")
    parser.add_argument("--dp", type=int, help="default: 1, or 2 if --tp is not given either")
    parser.add_argument("--tp", type=int, help="default: 1, or 2 if --dp is not given either")
    parser.add_argument("--experts", type=int, default=0, help="of each layer; over all devices")
    parser.add_argument("--top-k", type=int, default=0, help="experts that a byte goes to")
    parser.add_argument("--backend", choices=("auto", "pallas", "xla"), default="auto")
    parser.add_argument("--target", help="a GPU to compile for, such as h100")
    args = parser.parse_args(argv)
    sizes, training = config.SIZES[args.config], config.TRAININGS[args.config]
    sizes = config.replaced(sizes, experts=args.experts, top_k=args.top_k)
    neither = args.dp is None and args.tp is None
    dp, tp = (2, 2) if neither else (args.dp or 1, args.tp or 1)
    sizes.check_fits(dp, tp, training.batch)
    jax.config.update("jax_platforms", "cpu")  # Nothing runs, even if there are GPUs.
    if args.target:
        mesh = aot.mesh_of_gpus((dp, tp), parallel.AXES, target=args.target)
    else:
        jax.config.update("jax_num_cpu_devices", dp * tp)
        mesh = parallel.make_mesh(dp, tp)
    dtype = "bfloat16" if args.target else "float32"
    how = config.Execution(backend=args.backend, dtype=dtype)
    found = collectives(compiled_step(mesh, sizes, training, how).as_text() or "")
    if not found:
        print(f"A step on {dp} x {tp} (dp x tp) devices sends nothing; pass more of them.")
        return
    print("  n  where            what                          over    results on a device")
    for (where, kind, over, results), count in sorted(found.items()):
        print(f"{count:3d}  {where:15}  {kind:28}  {over:6}  {results}")


if __name__ == "__main__":
    main()
