"""The results file: its schema, and writing, reading and resuming it.

The names `size`, `count`, `type`, `time`, `alg_bw` and `bus_bw` are those of nccl-tests' JSON.
`docs/measure/benchmarks.md` documents every field.
"""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from stretto.benchmarks import files
from stretto.benchmarks.cases import shapes
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements import spread
from stretto.benchmarks.measurements.spread import Interval
from stretto.kernels.operation import Sizes
from stretto.kernels.operations import OPERATIONS

SCHEMA = "stretto-bench/1"


class Timed(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One peer's times of one case. Times in microseconds, bandwidths in GB/s (1e9 bytes).

    `time` is the median of the `samples`, each of which is a mean over `calls` calls. `intervals`
    has the 95% interval of figures, by their names. `temp_bytes` is what the program needs on a
    device besides operands and results. `looks` has the short first times of several candidates,
    by their configurations; the best of them was timed. `float32_error` is the relative difference
    of a product in 8 bits from that of the same numbers in float32, in some of its rows. `mhz` is
    the median clock of the slowest card's multiprocessors right after a visit, `at_power_limit` the
    share of visits after which the power limit lowered it.
    """

    peer: str
    role: str
    time: float
    time_p10: float
    time_p90: float
    samples: list[float]
    calls: int
    backend: str = ""
    config: str = ""
    tflops: float | None = None
    alg_bw: float | None = None
    bus_bw: float | None = None
    share_of_floor: float | None = None
    overlap_efficiency: float | None = None
    exposed: float | None = None
    over_xla: float | None = None
    intervals: dict[str, tuple[float, float]] = {}
    looks: dict[str, float] = {}
    relative_error: float | None = None
    float32_error: float | None = None
    temp_bytes: int | None = None
    mhz: float | None = None
    at_power_limit: float | None = None


class Missing(msgspec.Struct, kw_only=True):
    """A requested peer without a time, and the reason."""

    peer: str
    reason: str


class Sized(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A case, as results name it: `kernel` is the operation's name, `type` that of its elements.

    `m`, `k` and `n` are 0 where the operation has no size of that name. Sizes of other names are
    in `more_sizes`. `values` says how operands were drawn, if not in the usual way.
    """

    kernel: str
    m: int
    k: int
    n: int
    type: str
    devices: int
    more_sizes: dict[str, int] = {}
    values: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by name, `m`, `k` and `n` first."""
        named = {"m": self.m, "k": self.k, "n": self.n}
        return {name: size for name, size in named.items() if size} | self.more_sizes

    @property
    def key(self) -> tuple[str, tuple[int, ...], str, int, str]:
        """The key of the case."""
        sizes = tuple(self.sizes.values())
        return (self.kernel, sizes, self.type, self.devices, self.values)

    @property
    def shape(self) -> str:
        """The sizes as text: `MxKxN`, or `MxN` of a collective."""
        return shapes.text_of(self.sizes)


def size_fields(sizes: Sizes) -> dict[str, Any]:
    """The fields of `Sized` that hold `sizes`."""
    more = {name: size for name, size in sizes.items() if name not in "mkn"}
    return {name: sizes.get(name, 0) for name in "mkn"} | {"more_sizes": more}


class Measurement(Sized, kw_only=True, omit_defaults=True):
    """All peers' times of one case, taken in turns in one run, `per_visit` samples each time.

    `most_mhz` is the highest clock of the cards, where they tell.
    """

    size: int
    count: int
    flops: int
    sent_bytes: float
    sets: int = 1
    per_visit: int = 4
    floor: float | None = None
    matmul_floor: float | None = None
    communication_floor: float | None = None
    most_mhz: int | None = None
    skipped: str = ""
    timed: list[Timed] = []
    missing: list[Missing] = []

    @property
    def has_matmul(self) -> bool:
        """Whether the operation multiplies matrices; if not, it is a plain collective."""
        return self.flops > 0

    def of(self, peer: str) -> Timed | None:
        """The times of `peer`, None if it has none."""
        return next((timed for timed in self.timed if timed.peer == peer), None)

    def lower_floor(self) -> None:
        """Lowers the floor to the fastest program of the whole operation, so no share exceeds 1.

        Such a program multiplies as well, so the matmul takes at most as long. It can be faster
        than the few matmuls that were timed alone. Intervals of changed shares are dropped.
        """
        shared = [timed for timed in self.timed if timed.share_of_floor is not None]
        fastest = min((timed.time for timed in shared), default=None)
        if self.floor is None or fastest is None or not self.has_matmul or fastest >= self.floor:
            return
        self.floor = max(fastest, self.communication_floor or 0.0)
        for timed in shared:
            timed.share_of_floor = self.floor / timed.time
            timed.intervals.pop("share_of_floor", None)

    def ratio(self, ours: Timed, theirs: Timed) -> Interval | None:
        """Our time over theirs, of pairs of neighbours in time; None where there are too few."""
        return spread.ratio(ours.samples, theirs.samples, self.per_visit)

    def as_fast_as_the_fastest(self, peers: Collection[str]) -> list[Timed]:
        """The fastest of `peers` and those that cannot be told apart from it, fastest first."""
        ranked = sorted((t for t in self.timed if t.peer in peers), key=lambda timed: timed.time)
        return ranked[:1] + [
            timed
            for timed in ranked[1:]
            if (found := self.ratio(timed, ranked[0])) is not None and found.holds(1)
        ]


class Prediction(Sized, kw_only=True, omit_defaults=True):
    """Predicted times of a case in microseconds, with their intervals.

    `beyond` lists what goes beyond the measurements.
    """

    fused: float
    fused_low: float
    fused_high: float
    xla: float
    xla_low: float
    xla_high: float
    beyond: list[str] = []


def order_of(kernel: str) -> tuple[int, str]:
    """By which names of operations are sorted: as the operations are; those that are none last."""
    known = list(OPERATIONS)
    return (known.index(kernel) if kernel in OPERATIONS else len(known), kernel)


def in_order(kernels: Iterable[str]) -> list[str]:
    """The names, each once, in the order of the operations."""
    return sorted(set(kernels), key=order_of)


class Machine(msgspec.Struct, kw_only=True):
    """The machine and the software of the times; `xla_flags` are those of the environment."""

    card: str
    platform: str
    num_devices: int
    num_processes: int
    layout: str
    num_hosts: int
    driver: str
    versions: dict[str, str]
    commit: str
    xla_flags: str = ""


class Draw(msgspec.Struct, kw_only=True, frozen=True):
    """Cases that are drawn at random: `count` of these operations, on `devices` devices.

    The sizes are a device's, from 1 to `largest`, and come from `seed` alone. Of each case up to
    `candidates` of the kernels' configurations are drawn besides.
    """

    count: int
    seed: int
    operations: tuple[str, ...]
    devices: int
    type: str = "bfloat16"
    largest: int = 16384
    candidates: int = 10


class Results(msgspec.Struct, kw_only=True):
    """A whole results file; for drawn cases also the draw."""

    schema: str
    start_time: str
    command: list[str]
    machine: Machine
    measurement_of_speed: bool
    link_gb_per_s: float
    measurements: list[Measurement] = []
    predictions: list[Prediction] = []
    draw: Draw | None = None


def write(results: Results, path: pathlib.Path) -> None:
    """Writes `results` to `path`, whole or not at all; BenchmarkError if that cannot be."""
    encoded = msgspec.json.format(msgspec.json.encode(results), indent=1)
    files.write_whole(path, encoded + b"\n")


def read(path: pathlib.Path) -> Results:
    """The results in `path`.

    Raises:
      BenchmarkError: the file is missing, damaged, or of another schema.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BenchmarkError(f"{path}: {error.strerror}; give a file that --json wrote.") from None
    try:
        header = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise BenchmarkError(
            f"{path}: damaged, not JSON ({error}); measure again with --overwrite."
        ) from None
    schema = header.get("schema") if isinstance(header, dict) else None
    if schema != SCHEMA:
        raise BenchmarkError(
            f"{path}: its schema is {schema!r}, this version reads {SCHEMA!r}; measure again."
        )
    try:
        found = msgspec.convert(header, Results)
    except msgspec.ValidationError as error:
        raise BenchmarkError(f"{path}: damaged: {error}; measure again with --overwrite.") from None
    for measurement in found.measurements:
        measurement.lower_floor()
    return found
