"""The documented times: the README's table, and docs/measure/performance.md of one machine."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements.results import Measurement, Results, in_order
from stretto.benchmarks.measurements.select import case_order, is_goal, latest
from stretto.benchmarks.pages import markdown, terminal
from stretto.benchmarks.pages.machines import machine_of
from stretto.benchmarks.pages.markdown import NONE, rows
from stretto.benchmarks.pages.terminal import interval, number, percent

LEFT_OUT = ("auto", "xla-windowed")
"""Peers whose columns the README has no room for; the pages have them."""
README_ROWS = 6

METHOD = """\
Each time is the median of the samples; the interval beside it is their tenth and ninetieth
percentile. A sample is the mean over a run of many calls inside one `jit`, on the slowest device.
All programs of a row take turns in one run, in varying order. So compare times within a row: the
same kernel in another run may differ by several percent. [Benchmarks](benchmarks.md) has the whole
method.

**Stretto** is the kernel by itself, `backend="pallas"`; **`auto`**, the default, takes it where it
should be the fastest, and XLA elsewhere. It chose by the tuned tables of its run's day. Where
`auto` has XLA's time and the kernel a shorter one, today's tables may have the kernel:
`stretto explain` prints the choice.

The **floor** is the larger of two times: the fastest matmul *of this run*, and the bytes that a
device must send over its link. A matmul was timed alone and inside each program of the row; at 100%
no matmul of the row was faster than the program.

**The kernels may have changed since the commit that a result names.** [Changed since the
results](decisions.md#changed-since-the-results) lists the kernels whose device code differs.

Other machines, all peers and all numbers of devices are under [Results](../results/index.md);
what was tried to reach these times is under [Decisions](decisions.md).
"""


def readme_times(found: list[Results]) -> str:
    """Some goals' shapes of the fused matmuls, of the last run, and the machine in a sentence.

    At most `README_ROWS`. The last run that holds any, on its most devices: a run of fewer devices
    and today's kernels says more than one of more devices and kernels that have changed. The
    pages have the others.
    """
    goals = [pair for pair in latest(found) if is_goal(pair[1]) and pair[1].type == "bfloat16"]
    goals = [pair for pair in goals if pair[0].machine.num_processes == 1] or goals
    if not goals:
        raise BenchmarkError('the results hold no case of the shape set "goals".')
    last = max((one for one, _ in goals), key=lambda one: one.start_time)
    goals = [pair for pair in goals if pair[0].machine == last.machine]
    most = max(measurement.devices for _, measurement in goals)
    chosen = [pair for pair in goals if pair[1].devices == most]
    chosen = _spread(sorted(chosen, key=lambda pair: case_order(pair[1])))
    machines = dict.fromkeys(machine_of(one) for one, _ in chosen)
    return (
        f"Microseconds on {most} devices ({'; '.join(machines)}); in brackets the share of the"
        " floor, the larger of the fastest matmul of the row and of the bytes to be sent at"
        f" {chosen[0][0].link_gb_per_s:.0f} GB/s. Bold: the fastest, and what cannot be told apart"
        " from it.\n\n" + markdown.times_table([measurement for _, measurement in chosen], LEFT_OUT)
    )


def _spread(pairs: list[tuple[Results, Measurement]]) -> list[tuple[Results, Measurement]]:
    """At most `README_ROWS` of them: of each kernel as many, evenly spread over the work."""
    kernels = in_order(m.kernel for _, m in pairs)
    most = max(1, README_ROWS // max(1, len(kernels)))
    found = []
    for kernel in kernels:
        of_kernel = [pair for pair in pairs if pair[1].kernel == kernel]
        count = min(most, len(of_kernel))
        found += [of_kernel[(2 * i + 1) * len(of_kernel) // (2 * count)] for i in range(count)]
    return found[:README_ROWS]


def page(found: list[Results], names: list[str], pictures: Sequence[str] = ()) -> str:
    """The whole of docs/measure/performance.md, of the results of one machine.

    `pictures` are files, as the page reaches them.
    """
    parts = ["# Performance\n"]
    measurements = [measurement for _, measurement in latest(found)]
    if not measurements:
        return parts[0] + "\nNo results yet: `stretto bench document FILE...` writes this page.\n"
    measurements.sort(key=case_order)
    parts += [
        *(f"- {machine_of(one)}" for one in found),
        "",
        METHOD,
    ]
    for kernel in in_order(m.kernel for m in measurements):
        cases = [m for m in measurements if m.kernel == kernel]
        cases = [m for m in cases if m.devices == max(m.devices for m in cases)]
        parts += [f"## {kernel}\n"]
        parts += [_picture(path) for path in pictures if _shows(path, kernel)]
        parts += [_intervals(cases)]
    parts += ["## All kernels\n"]
    parts += [_picture(path) for path in pictures if _stem(path) in ("share-of-floor", "roofline")]
    if worst := terminal.never_slower_line(measurements):
        parts += [worst + ".\n"]
    return "\n".join([*parts, markdown.written_by(names)])


def _intervals(cases: Sequence[Measurement]) -> str:
    """A row a case: floor; times of the kernel, `auto` and XLA, with their intervals; shares."""
    body = []
    for m in cases:
        ours, auto, xla = (m.of(peer) for peer in ("fused", "auto", "xla"))
        cells = [
            interval(one.time, one.time_p10, one.time_p90) if one else NONE
            for one in (ours, auto, xla)
        ]
        over = f"{xla.time / auto.time:.2f}" if auto and xla else NONE
        share = (percent(ours.share_of_floor) if ours else "") or NONE
        body.append([m.shape, m.type, number(m.floor) or NONE, *cells, over, share])
    times = ["floor, us", "Stretto, us", "`auto`, us", "XLA, us"]
    return rows(["shape", "type", *times, "XLA / `auto`", "Stretto of floor"], body, left=2)


def _stem(path: str) -> str:
    return pathlib.PurePath(path).stem


def _shows(path: str, kernel: str) -> bool:
    return _stem(path) in {
        f"{kind}-{kernel}" for kind in ("rate", "bandwidth", "latency", "scaling")
    }


def _picture(path: str) -> str:
    return f"![{_stem(path)}]({path})\n"
