"""Many launches of random sizes in random order, while one device after another comes late.

All random choices come from a seed, alike on every process. Sizes are compiled once, side by side;
after that a launch costs what it costs. In every second size one device, drawn by lot, sleeps
inside the kernel before each of its signals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Iterator

import compiling
import jax
import launching
import numpy as np
import slow_peers
import subjects
from jax.sharding import Mesh
from subjects import Sizes, Subject


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to do.

    Attributes:
      seed: of everything that is drawn by lot.
      sizes: different sizes; each is launched and verified once a round.
      rounds: how often all of them.
      unverified: launches of a round that are not looked at, shared out at random.
      largest: of a device's m, k and n.
      host_us: longest delay of a device by the host, microseconds.
      kernel_us: a device's sleep before each signal, microseconds; 0 for none.
    """

    seed: int = 0
    sizes: int = 25
    rounds: int = 10
    unverified: int = 100
    largest: int = 1024
    host_us: int = 10_000
    kernel_us: int = 200


@dataclasses.dataclass
class Result:
    """What came of it: launches in all, those of them that were verified, and what was wrong."""

    launches: int = 0
    verified: int = 0
    flaws: list[str] = dataclasses.field(default_factory=list)


def stress(name: str, mesh: Mesh, plan: Plan) -> Result:
    """Carries out the plan for operation `name`."""
    rng = np.random.default_rng([plan.seed, zlib.crc32(name.encode())])
    result = Result()
    compiled = []
    for label, program in _compile(name, mesh, plan, rng):
        if isinstance(program, Exception):
            result.flaws.append(f"{label}: {compiling.first_line(program)}")
        else:
            compiled.append((label, program))
    for number in range(plan.rounds if compiled else 0):
        try:
            _round(compiled, mesh, plan, rng, number, result)
        except jax.errors.JaxRuntimeError as error:
            result.flaws.append(f"round {number}: {compiling.first_line(error)}")
            break
    return result


def variants(name: str) -> list[Subject]:
    """The operation in each of its types."""
    if name in subjects.COLLECTIVES:
        return [subjects.collective(name, dtype) for dtype in subjects.dtypes_of(name)]
    return [subjects.SUBJECTS[name]]


def random_sizes(rng: np.random.Generator, subject: Subject, devices: int, largest: int) -> Sizes:
    """Sizes of the whole problem; a device's are spread evenly over the powers of two."""
    m, k, n = np.exp2(rng.uniform(0, np.log2(largest + 1), 3)).astype(int).clip(1, largest)
    return subject.sizes_of(devices, int(m), int(k), int(n))


def _compile(name: str, mesh: Mesh, plan: Plan, rng: np.random.Generator) -> Iterator[tuple]:
    """(label, program or why there is none) for each size."""
    kinds = variants(name)
    dawdler = _Dawdler()

    def programs():
        for number in range(plan.sizes):
            subject = kinds[number % len(kinds)]
            sizes = random_sizes(rng, subject, mesh.size, plan.largest)
            dawdler.device = int(rng.integers(mesh.size)) if number % 2 else None
            label = f"{subject.name} {'x'.join(map(str, sizes))}"
            if dawdler.device is not None and plan.kernel_us:
                label += f", device {dawdler.device} dawdles"
            program = launching.last_one_verified(subject, mesh, sizes, backend="pallas")
            yield label, program, tuple(map(compiling.scalar, (0, 1, 0, 0)))

    slow = dawdler.signals(plan.kernel_us) if plan.kernel_us else contextlib.nullcontext()
    with slow:
        yield from compiling.side_by_side(programs())


class _Dawdler:
    """The device that sleeps in the kernels that are being traced; None for nobody."""

    def __init__(self) -> None:
        self.device: int | None = None

    def signals(self, microseconds: int) -> contextlib.AbstractContextManager[None]:
        def late(send, semaphore):
            if self.device is not None:
                slow_peers.sleep_on(semaphore.team, self.device, microseconds)
            send()

        return slow_peers.signals(late)


def _round(compiled, mesh, plan, rng, number, result) -> None:
    """Launches all, in random order, and only then looks at what came out."""
    shares = rng.multinomial(plan.unverified, [1 / len(compiled)] * len(compiled))
    started = []
    for index in rng.permutation(len(compiled)):
        label, program = compiled[index]
        calls = 1 + int(shares[index])
        late = int(rng.integers(mesh.size))
        delay = int(plan.host_us * rng.uniform() ** 2)
        seed = plan.rounds * int(index) + number
        arguments = map(compiling.scalar, (seed, calls, late, delay))
        started.append((label, late, delay, program(*arguments)))
        result.launches += calls
    for label, late, delay, wrong in started:
        result.verified += 1
        wrong = np.asarray(wrong)
        if wrong.any():
            result.flaws.append(
                f"round {number}, {label}, device {late} late by {delay} us: wrong elements, by"
                f" device: {wrong}"
            )
