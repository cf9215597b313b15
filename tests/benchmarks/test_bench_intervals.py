"""Intervals of what was timed, and which two are called equal."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from rich.console import Console

from stretto.benchmarks.measurements import intervals, spread
from stretto.benchmarks.measurements.results import Measurement, Timed
from stretto.benchmarks.pages import markdown, terminal


def _timed(peer: str, samples, role: str = "other") -> Timed:
    times = spread.spread(samples)
    return Timed(
        peer=peer,
        role=role,
        time=times.median,
        time_p10=times.p10,
        time_p90=times.p90,
        samples=[float(sample) for sample in samples],
        calls=1,
    )


def _measurement(**samples) -> Measurement:
    roles = {"fused": "fused", "xla": "xla", "matmul": "matmul", "communication": "communication"}
    found = Measurement(
        **dict(kernel="all_gather_matmul", m=64, k=64, n=64, type="bfloat16", devices=2),
        **dict(size=1, count=1, flops=1, sent_bytes=1, per_visit=2),
    )
    found.timed = [
        _timed(name.replace("_", "-"), s, roles.get(name, "other")) for name, s in samples.items()
    ]
    return found


def test_the_interval_covers_the_true_ratio_as_often_as_it_says():
    """And the drift that both share is not in it."""
    covered = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        drift = np.repeat(rng.normal(0, 0.2, 10), 2)
        ours, theirs = (np.repeat(rng.normal(0, 0.01, 10), 2) for _ in range(2))
        found = spread.ratio(1.1 * np.exp(drift + ours), np.exp(drift + theirs), 2)
        assert found.half < 0.03
        covered += found.holds(1.1)
    assert 0.92 < covered / 400 < 0.98


def test_samples_of_one_visit_are_one_observation():
    """Twenty samples in two visits say less than twenty visits."""
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(100, 1, 20), rng.normal(100, 1, 20)
    assert spread.ratio(ours, theirs, 10).half > 4 * spread.ratio(ours, theirs, 1).half
    assert spread.ratio(ours, theirs, 20) is None


def test_a_visit_that_was_cut_short_counts():
    assert spread.visits([1.0, 2.0, 9.0, 4.0, 6.0], 3).tolist() == [2.0, 5.0]
    assert spread.visits([1.0, 2.0, 9.0], 3).tolist() == [2.0]


def test_an_interval_is_students():
    found = spread.interval([1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert found.half == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert spread.interval([1.0]) is None
    assert spread.interval([1.0, 1.0]).holds(1.0)


def test_runs_that_make_no_pairs_are_compared_by_welch():
    rng = np.random.default_rng(1)
    one, other = np.exp(rng.normal(0, 0.01, 10)), np.exp(rng.normal(0, 0.05, 30))
    found = spread.ratio_of_runs(one, other, (1, 1))
    assert found.holds(1.0) and 0.01 < found.half < 0.05
    assert not spread.ratio_of_runs(1.1 * one, other, (1, 1)).holds(1.0)
    assert spread.ratio_of_runs(one[:2], other, (2, 1)) is None


def test_figures_of_a_case_have_their_intervals():
    rng = np.random.default_rng(2)
    noise = lambda: np.repeat(np.exp(rng.normal(0, 0.005, 10)), 2)  # noqa: E731
    found = _measurement(
        fused=110 * noise(), xla=150 * noise(), matmul=100 * noise(), communication=60 * noise()
    )
    fused = found.of("fused")
    found.matmul_floor = found.floor = found.of("matmul").time
    fused.over_xla, fused.share_of_floor, fused.exposed = 110 / 150, 100 / 110, 10.0
    fused.overlap_efficiency = 50 / 60
    intervals.fill(found, fused)
    for name, value in (
        ("over_xla", 110 / 150),
        ("share_of_floor", 100 / 110),
        ("exposed", 10.0),
        ("overlap_efficiency", 50 / 60),
    ):
        low, high = fused.intervals[name]
        assert low < value < high
    assert fused.intervals["share_of_floor"][1] < 0.92
    # Where the link is the floor, the share is as uncertain as the time alone.
    found.floor = 105.0
    fused.share_of_floor = 105 / 110
    intervals.fill(found, fused)
    low, high = fused.intervals["share_of_floor"]
    assert low < 105 / 110 < high


def test_two_within_the_interval_are_called_equal():
    rng = np.random.default_rng(3)
    noise = lambda: np.exp(rng.normal(0, 0.01, 20))  # noqa: E731
    found = _measurement(fused=100 * noise(), xla=100.1 * noise(), torch=120 * noise())
    for timed in found.timed:
        timed.over_xla = 1.0
        intervals.fill(found, timed)
    console = Console(width=120, file=io.StringIO())
    terminal.print_measurement(console, found, "gpu")
    text = console.file.getvalue()
    assert "equal to Stretto: XLA" in text or "equal to XLA: Stretto" in text
    lines = [line for line in text.splitlines() if " = " in line + " "]
    assert not any(line.startswith("torch") for line in lines)
    row = markdown.times_table([found])
    assert row.count("**") == 4  # Two in bold, and torch is not.
    far = _measurement(fused=90 * noise(), xla=100 * noise())
    assert terminal.equal_sentence(far) == ""
    assert markdown.times_table([far]).count("**") == 2


def test_difference_says_equal_where_it_may_be_none():
    assert markdown.difference(spread.Interval(1.01, 0.99, 1.03)) == "equal (+1.0±2.0%)"
    assert markdown.difference(spread.Interval(1.05, 1.03, 1.07)) == "+5.0±2.0%"
    assert markdown.difference(None) == markdown.NONE
