"""`stretto explain`: which implementation a call would take on GPUs that need not be here."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from typing import Annotated, Any

import jax
import tyro
from tyro.conf import Positional, arg

from stretto.kernels.operations import OPERATIONS
from stretto.kernels.operations.explain_sizes import explain_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """Print whether the fused kernel or XLA serves a call of these sizes, and why; needs no GPU."""

    operation: Annotated[str, Positional, arg(help=f"One of {', '.join(OPERATIONS)}.")]
    sizes: Annotated[str, Positional, arg(metavar="MxKxN")]
    """Of the whole problem, as 8192x8192x28672; of a collective, one device's rows and columns."""
    devices: Annotated[int, arg(aliases=["-n"])] = 4
    """The team's size."""
    kind: str = "NVIDIA H200"
    """Type of GPU: the driver's name or a part of it."""
    dtype: str = "bfloat16"
    """Of the operands."""


def main(argv: list[str]) -> int:
    """Runs `stretto explain ARGV`; 0, or 2 on misuse."""
    options = tyro.cli(ExplainOptions, prog="stretto explain", args=argv)
    jax.config.update("jax_platforms", "cpu")  # GPUs that are here need not be started.
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            text = explained(options)
    except ValueError as error:
        print(f"stretto explain: {error}", file=sys.stderr)
        return 2
    for message in dict.fromkeys(str(warning.message) for warning in found):
        print(f"stretto explain: {message}", file=sys.stderr)
    print(text)
    return 0


def explained(options: ExplainOptions) -> str:
    """The text that is printed; ValueError for what `explain_sizes` does not take."""
    record = OPERATIONS.get(options.operation)
    names = record.sizes if record is not None else ()
    words = options.sizes.split("x")
    if record is not None and (len(words) != len(names) or not all(map(str.isdecimal, words))):
        wanted = f"{len(names)} numbers joined by x: {', '.join(names)}"
        raise ValueError(f"sizes {options.sizes!r} must be {wanted}.")
    sizes: dict[str, Any] = {}
    if record is not None:
        sizes = dict(zip(names, map(int, words), strict=True))
    found = explain_sizes(
        options.operation, devices=options.devices, kind=options.kind, dtype=options.dtype, **sizes
    )
    return str(found)
