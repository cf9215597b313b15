"""Results as tables in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from stretto.benchmarks.measurements.machine import is_gpu
from stretto.benchmarks.measurements.results import Measurement, Prediction, Results, Timed
from stretto.benchmarks.peers.peer import COMMUNICATION, MATMUL
from stretto.benchmarks.peers.peers import PEERS

NOT_A_MEASUREMENT = (
    "CPU devices, or a rehearsal: the times show that the benchmark runs, not how fast anything is."
)


def print_measurement(console: Console, measurement: Measurement, platform: str) -> None:
    """One case, timed on `platform`: a row per peer, fastest first, then what is missing and why.

    On GPUs XLA's collectives are NCCL's; elsewhere the peer that times one alone says just that.
    """
    if measurement.skipped:
        console.print(f"{heading(measurement)}: skipped, {measurement.skipped}", highlight=False)
        return
    collective, on_gpu = not measurement.has_matmul, is_gpu(platform)
    table = Table(
        title=heading(measurement), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("peer", no_wrap=True)
    for column in columns(collective):
        table.add_column(column, justify="right", no_wrap=True)
    for timed in sorted(measurement.timed, key=lambda timed: timed.time):
        name = label(timed) if on_gpu else label(timed).replace("NCCL", "collective")
        table.add_row(name, *cells(timed, collective))
    console.print(table)
    if measurement.floor is not None:
        console.print(f"  {floor_sentence(measurement)}", highlight=False)
    if clocks := clocks_sentence([measurement]):
        console.print(f"  {clocks}", highlight=False)
    if equal := equal_sentence(measurement):
        console.print(f"  {equal}", highlight=False)
    for missing in measurement.missing:
        line = f"  no {peer_label(missing.peer)}: {missing.reason}"
        console.print(line, highlight=False, markup=False)
    console.print()


def heading(measurement: Measurement) -> str:
    """Kernel, shape, type and devices in one line."""
    plural = "device" if measurement.devices == 1 else "devices"
    drawn = f" {measurement.values}" if measurement.values else ""
    return (
        f"{measurement.kernel} {measurement.shape} {measurement.type}{drawn},"
        f" {measurement.devices} {plural}"
    )


def columns(collective: bool) -> list[str]:
    """The headings of `cells`."""
    rates = ["alg GB/s", "bus GB/s"] if collective else ["TFLOP/s"]
    overlap = [] if collective else ["exposed us", "overlap"]
    return ["us", "p10", "p90", *rates, "of floor", *overlap, "over XLA"]


def label(timed: Timed) -> str:
    """The peer's name as people write it, with what serves it where that is a choice."""
    chosen = f" ({timed.backend})" if timed.peer == "auto" and timed.backend else ""
    return peer_label(timed.peer) + chosen


def peer_label(peer: str) -> str:
    """A peer's name as people write it."""
    return PEERS[peer].label if peer in PEERS else peer


def cells(timed: Timed, collective: bool) -> list[str]:
    """One peer's figures as text, empty where there is none."""
    rates = [timed.alg_bw, timed.bus_bw] if collective else [timed.tflops]
    share = percent(timed.share_of_floor) + margin(timed, "share_of_floor", 100, 0)
    hidden = percent(timed.overlap_efficiency) + margin(timed, "overlap_efficiency", 100, 0)
    overlap = [] if collective else [number(timed.exposed) + margin(timed, "exposed", 1, 1), hidden]
    ratio = "" if timed.over_xla is None else f"{timed.over_xla:.3f}"
    ratio += margin(timed, "over_xla", 1, 3) + equal_mark(timed)
    times = [number(timed.time), number(timed.time_p10), number(timed.time_p90)]
    return [*times, *(number(rate) for rate in rates), share, *overlap, ratio]


def margin(timed: Timed, figure: str, scale: float, digits: int) -> str:
    """Half the width of a figure's 95% interval, as "±1"; empty where there is none."""
    found = timed.intervals.get(figure)
    return "" if found is None else f"±{scale * (found[1] - found[0]) / 2:.{digits}f}"


def equal_mark(timed: Timed) -> str:
    """ " =" where a time cannot be told apart from XLA's."""
    low, high = timed.intervals.get("over_xla", (2, 2))
    return " =" if low <= 1 <= high else ""


def equal_sentence(measurement: Measurement) -> str:
    """The peers that cannot be told apart from the fastest; empty if there are none."""
    whole = {t.peer for t in measurement.timed if t.role not in (MATMUL, COMMUNICATION)}
    alike = measurement.as_fast_as_the_fastest(whole)
    if len(alike) < 2:
        return ""
    return f"equal to {label(alike[0])}: {', '.join(map(label, alike[1:]))}"


def floor_sentence(measurement: Measurement) -> str:
    """The floor and its parts."""
    sent = f"communication {number(measurement.communication_floor)} us"
    if measurement.matmul_floor is None:
        return f"floor {number(measurement.floor)} us: {sent}"
    parts = f"matmul {number(measurement.matmul_floor)} us, {sent}"
    if (measurement.floor or 0.0) < measurement.matmul_floor:
        return f"floor {number(measurement.floor)} us, the fastest of the row; alone: {parts}"
    return f"floor {number(measurement.floor)} us, the larger of {parts}"


def clocks_sentence(measurements: Sequence[Measurement]) -> str:
    """The clocks at which peers were timed; empty where the cards did not tell."""
    known = [timed for one in measurements for timed in one.timed if timed.mhz is not None]
    if not known:
        return ""
    clocks = [round(timed.mhz or 0) for timed in known]
    span = " to ".join(map(str, sorted({min(clocks), max(clocks)})))
    limited = max(timed.at_power_limit or 0.0 for timed in known)
    cause = f", lowered by the power limit in up to {percent(limited)} of the visits"
    most = max(one.most_mhz or 0 for one in measurements)
    return f"clocks {span} of {most} MHz{cause if limited else ''}"


def number(value: float | None) -> str:
    """Three or four significant digits, empty for None."""
    if value is None:
        return ""
    return (
        f"{value:.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )


def interval(value: float, low: float, high: float) -> str:
    """A predicted value with its interval in brackets."""
    return f"{number(value)} ({number(low)} to {number(high)})"


def percent(value: float | None) -> str:
    """A share as a percentage, empty for None."""
    return "" if value is None else f"{100 * value:.0f}%"


def machine_line(results: Results) -> str:
    """Card, count, layout and versions in one line."""
    machine = results.machine
    versions = machine.versions
    nccl = versions.get("nvidia-nccl-cu13") or versions.get("nvidia-nccl-cu12")
    parts = [
        f"{machine.num_devices} x {machine.card}",
        machine.layout,
        f"JAX {versions.get('jax', '?')}",
        f"NCCL {nccl}" if nccl and machine.platform == "gpu" else "",
        f"driver {machine.driver}" if machine.driver else "",
        f"XLA_FLAGS={machine.xla_flags}" if machine.xla_flags else "",
    ]
    return ", ".join(part for part in parts if part)


def never_slower_line(measurements: list[Measurement]) -> str | None:
    """The case in which `auto` is slowest relative to XLA, None if it was never timed beside it."""
    beside = [
        (timed.over_xla, measurement, timed)
        for measurement in measurements
        if (timed := measurement.of("auto")) is not None and timed.over_xla is not None
    ]
    if not beside:
        return None
    ratio, measurement, worst = max(beside, key=lambda one: one[0])
    slower = sum(timed.intervals.get("over_xla", (0,))[0] > 1 for *_, timed in beside)
    return (
        f"{PEERS['auto'].label} over XLA, {len(beside)} cases: at worst"
        f" {ratio:.3f}{margin(worst, 'over_xla', 1, 3)}, at {heading(measurement)};"
        f" slower in {slower}, by the 95% intervals"
    )


def print_predictions(
    console: Console, predictions: Sequence[Prediction], measurements: Sequence[Measurement]
) -> None:
    """Predicted and, where there is one, measured time of every case."""
    measured = {measurement.key: measurement for measurement in measurements}
    rows = Table(
        title="predicted, in us", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in ("kernel", "shape", "devices", "Stretto", "measured", "XLA", "measured"):
        rows.add_column(column, justify="left" if column in ("kernel", "shape") else "right")
    for one in sorted(predictions, key=_order):
        real = measured.get(one.key)
        times = [real.of(peer) if real is not None else None for peer in ("fused", "xla")]
        fused, xla = (number(timed.time) if timed is not None else "" for timed in times)
        rows.add_row(
            one.kernel,
            one.shape,
            str(one.devices),
            interval(one.fused, one.fused_low, one.fused_high),
            fused,
            interval(one.xla, one.xla_low, one.xla_high),
            xla,
        )
    console.print(rows)


def _order(prediction: Prediction) -> tuple:
    work = math.prod(prediction.sizes.values())
    return (prediction.kernel, work, prediction.devices)
