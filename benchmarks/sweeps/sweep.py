"""The options of `stretto bench KERNEL`, on the command line or in a sweep file."""

from __future__ import annotations

import pathlib

import msgspec

from stretto.benchmarks.cases.shapes import operation_named, shapes_of, suits
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.peers.peers import peers_named
from stretto.kernels.operation import Operation
from stretto.kernels.operations import KNOWN, OPERATIONS

DTYPES = ("bfloat16", "float16", "float32")


class Sweep(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One list of cases to time: every kernel at every shape, type and device count.

    Empty tuples stand for the defaults: all kernels, the set "goals" (on a CPU "tiny"), all device
    counts that are powers of two up to those present (on a CPU all devices), all peers. `scaling`
    "weak" multiplies the rows of every shape by the device count; "strong" (and "") leaves shapes
    as they are. `values` are ways to draw the operands, "" for the usual one; an operation that has
    no such way is left out.
    """

    kernels: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16",)
    peers: tuple[str, ...] = ()
    scaling: str = ""
    values: tuple[str, ...] = ("",)

    def check(self) -> None:
        """Raises BenchmarkError for anything unknown, with what is known."""
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise BenchmarkError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}.")
        for count in self.devices:
            if count < 1:
                raise BenchmarkError(f"devices={count} must be at least 1.")
        if self.scaling not in ("", "strong", "weak"):
            raise BenchmarkError(f'scaling {self.scaling!r} is not "strong" or "weak".')
        known = {name for record in KNOWN.values() for name in record.examples.values}
        for name in self.values:
            if name and name not in known:
                raise BenchmarkError(f"values {name!r} is not one of {', '.join(sorted(known))}.")
        try:
            operations = self.operations()
            peers_named(self.peers)
            for text in self.shapes:
                fitting = [operation for operation in operations if suits(text, operation)]
                shapes_of(text, (fitting or operations)[0], 1)
        except ValueError as error:
            raise BenchmarkError(str(error)) from None

    def operations(self) -> list[Operation]:
        """The operations that are swept, all by default; ValueError for one that is unknown."""
        return [operation_named(name) for name in self.kernels or OPERATIONS]


class SweepFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A file of `configs/bench/`: sweeps that are run one after another."""

    sweep: tuple[Sweep, ...]
    about: str = ""


def read_sweeps(path: pathlib.Path) -> tuple[Sweep, ...]:
    """The sweeps of a TOML file; BenchmarkError if it is missing, damaged or names the unknown."""
    try:
        sweeps = msgspec.toml.decode(path.read_bytes(), type=SweepFile).sweep
    except OSError as error:
        raise BenchmarkError(f"{path}: {error.strerror}; see configs/bench/.") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BenchmarkError(f"{path}: {error}") from None
    for sweep in sweeps:
        sweep.check()
    return sweeps
