"""Sizes drawn at random: how they are drawn, what is said of their times, and a run of a few."""

from __future__ import annotations

import collections
import math
import re

import numpy as np
import pytest
from bench_cases import case_of

from stretto.benchmarks.cases.meshes import mesh_of
from stretto.benchmarks.commands import bench as command
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements import results, spread
from stretto.benchmarks.measurements.results import Draw, Measurement, Missing, Timed
from stretto.benchmarks.never_slower import candidates, summary
from stretto.benchmarks.never_slower.candidates import DRAWN
from stretto.benchmarks.never_slower.draw import (
    MOST_OTHERS,
    cases,
    decade_of,
    drawable,
    kind_of,
    sizes_of_a_device,
)
from stretto.benchmarks.never_slower.verdicts import is_decided, verdict
from stretto.benchmarks.timing import stored
from stretto.kernels.operations import OPERATIONS

EVERY = tuple(name for name, operation in OPERATIONS.items() if drawable(operation))


def draw_of(count=200, seed=0, devices=2, **more) -> Draw:
    return Draw(count=count, seed=seed, devices=devices, **({"operations": EVERY} | more))


def test_a_draw_comes_from_its_seed():
    one, again, other = (cases(draw_of(seed=seed)) for seed in (1, 1, 2))
    assert [case.key for case in one] == [case.key for case in again]
    assert {case.key for case in one} != {case.key for case in other}
    assert len({case.key for case in one}) == 200


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_every_operation_and_decade_has_its_share(devices):
    found = cases(draw_of(devices=devices))
    operations = collections.Counter(case.operation.name for case in found)
    assert max(operations.values()) - min(operations.values()) <= 1
    strata = collections.Counter((case.operation.name, decade_of(case)) for case in found)
    for name in EVERY:
        # A decade of the 4.2 that there are, but for the part of the last one.
        whole = [strata[name, 10**power] for power in range(4)]
        each = operations[name] / math.log10(16384)
        assert all(abs(count - each) <= 2 for count in whole)
    kinds = collections.Counter(kind_of(case) for case in found)
    assert kinds["odd"] / 200 == pytest.approx(1 / 3, abs=0.05)
    assert kinds["eights"] / 200 >= 0.3
    for case in found:
        case.check()  # It can be cut into the devices' shares.
        sizes = sizes_of_a_device(case)
        assert all(1 <= size <= 16384 for size in sizes.values())
        assert sizes.get("g", 1) <= MOST_OTHERS
        assert case.devices == (devices if case.operation.communicates else 1)


def test_sizes_are_log_uniform():
    found = cases(draw_of(4000, operations=("matmul_all_reduce",), devices=1))
    for name in "mkn":
        logs = np.log(sorted(case.sizes[name] for case in found if case.sizes[name] > 16))
        shares = (logs - math.log(16)) / math.log(16384 / 16)
        assert np.abs(shares - np.linspace(0, 1, len(logs))).max() < 0.04
    # What comes first is of all kinds, so that a run that is interrupted has seen them all.
    first = {(kind_of(case), decade_of(case)) for case in found[:200]}
    assert len(first) >= 12


def test_more_cases_than_there_are_is_an_error():
    with pytest.raises(BenchmarkError, match="more than there are; ask for fewer"):
        cases(draw_of(200, operations=("all_gather",), largest=8))


def measurement_of(auto=1.0, drawn=None, noise=0.004, same=False, seed=0, **more) -> Measurement:
    """Times of XLA, of `auto` that takes so many times as long, and of a drawn one over `auto`."""
    rng = np.random.default_rng(seed)
    fields = dict(kernel="all_gather_matmul", m=64, k=30, n=64, type="bfloat16", devices=2)
    found = Measurement(**fields, size=1, count=1, flops=1, sent_bytes=1, per_visit=2, **more)
    paces = {"auto": auto, "xla": 1.0} | ({} if drawn is None else {DRAWN: drawn * auto})
    for name, pace in paces.items():
        samples = [float(100 * pace * np.exp(rng.normal(0, noise))) for _ in range(20)]
        if same and name == "xla":
            samples = found.timed[0].samples
        middle = float(np.median(samples))
        ends = {"time": middle, "time_p10": middle, "time_p90": middle}
        found.timed.append(Timed(peer=name, role="fused", samples=samples, calls=1, **ends))
    return found


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (dict(auto=1.05), "slower"),
        (dict(auto=1.005), ""),
        (dict(auto=0.9), ""),
        (dict(auto=1.02), "undecided"),
        (dict(auto=1.05, noise=0.2), "undecided"),
        (dict(auto=0.9, drawn=0.95), "beaten"),
        (dict(auto=0.9, drawn=0.98), ""),
        (dict(auto=1.05, drawn=0.9), "slower beaten"),
        (dict(same=True), "same"),
    ],
)
def test_what_is_said_of_a_case(times, said):
    found = verdict(measurement_of(**times))
    words = {"slower": found.is_slower, "undecided": found.is_undecided}
    words |= {"beaten": found.is_beaten, "same": found.same_program}
    assert " ".join(word for word, holds in words.items() if holds) == said


@pytest.mark.parametrize(
    ("times", "rounds", "decided"),
    [
        (dict(auto=0.9), 4, True),
        (dict(auto=0.9), 1, False),  # One round has no interval.
        (dict(auto=1.02), 10, False),
        (dict(auto=1.05), 10, True),
        (dict(auto=1.05, noise=0.2), 10, False),
        (dict(auto=0.9, drawn=0.97), 10, False),
        (dict(auto=0.9, drawn=1.1), 4, True),
        (dict(same=True), 2, True),
    ],
)
def test_a_case_ends_once_more_samples_would_change_nothing(times, rounds, decided):
    timed = measurement_of(**times).timed
    samples = {one.peer: one.samples[: 2 * rounds] for one in timed}
    assert is_decided(samples, 2) == decided


def test_ending_early_is_seldom_wrong():
    """Of ratios at the limit few are called slower, as by intervals that are read once."""
    rng = np.random.default_rng(0)
    wrong, cases = 0, 1000
    for _ in range(cases):
        xla = 100 * np.exp(rng.normal(0, 0.01, 20))
        auto = 102 * np.exp(rng.normal(0, 0.01, 20))
        for count in range(2, 22, 2):
            samples = {"auto": auto[:count], "xla": xla[:count]}
            if is_decided(samples, 2):
                break
        found = spread.ratio(samples["auto"], samples["xla"], 2)
        wrong += found is not None and found.low > 1.02
    assert wrong / cases < 0.04  # 0.025 of intervals that are read once.


def test_the_summary_counts_and_names_the_mistakes(make_results):
    found = make_results(kernels=("all_gather",))
    found.draw = draw_of(6, seed=9)
    wrong = measurement_of(auto=0.9)
    reason = "its result is wrong: relative error 1 against XLA's, allowed 0.02"
    wrong.missing.append(Missing(peer=DRAWN, reason=reason))
    failed = measurement_of()
    failed.timed = failed.timed[1:]
    failed.missing.append(Missing(peer="auto", reason="it failed"))
    found.measurements = [
        measurement_of(same=True),
        measurement_of(auto=1.05),
        measurement_of(auto=0.9, drawn=0.9),
        wrong,
        failed,
        measurement_of(skipped="it needs 9.0 GB on each device and 1.0 GB are there"),
    ]
    text = summary.of(found)
    assert "slower than XLA in 1 of 4 cases, and in 1 a configuration" in text
    assert "In 1 it was XLA's own program, in 0 nothing can be said of 2%, and 2 were not" in text
    assert re.search(
        r"\| `all_gather_matmul` \| 64x30x64 \|  \| 1\.0[45]\d±0\.00\d \| - \| - \|", text
    )
    assert reason in text and "1 not timed: it does not fit in memory" in text
    assert "1 not timed: auto: it failed" in text
    assert "| all_gather_matmul | 6 | 4 | 1 | 1 | 0 | 1 |" in text
    assert "| 10 | 6 | 4 |" in text and "| even | 6 | 4 |" in text
    assert summary.slower(found) == 1


def run(path, *options: str) -> int:
    base = ["--kernels", "all_gather,matmul_all_reduce", "--devices", "2", "--largest", "32"]
    base += ["--repeats", "4", "--candidates", "2", "--json", str(path)]
    return command.main(["never-slower", *base, *options])


def test_a_run_is_interrupted_and_continued(tmp_path, capsys):
    path = tmp_path / "r.json"
    assert run(path, "--random", "3", "--seed", "5", "--minutes", "0") == 0
    captured = capsys.readouterr()
    assert "the time limit has passed; continue with --resume" in captured.err
    assert "0 of 3 cases done" in captured.out
    assert run(path, "--random", "3", "--seed", "5") == 2  # would overwrite
    assert "continue it with --resume" in capsys.readouterr().err
    assert run(path, "--random", "3", "--seed", "6", "--resume") == 2
    assert "it holds Draw(" in capsys.readouterr().err
    assert run(path, "--random", "3", "--seed", "5", "--resume") in (0, 1)
    out = capsys.readouterr().out
    found = results.read(path)
    draw = draw_of(
        3, seed=5, largest=32, candidates=2, operations=("all_gather", "matmul_all_reduce")
    )
    assert found.draw == draw
    assert {one.key for one in found.measurements} == {case.key for case in cases(draw)}
    assert "3 of 3 cases done" in out and "the times show that the benchmark runs" in out
    for one in found.measurements:
        # Here `auto` is XLA's program, and so are the configurations.
        assert [timed.peer for timed in one.timed] == ["auto", "xla", DRAWN]
        assert verdict(one).same_program
        drawn = one.of(DRAWN)
        assert drawn.config in drawn.looks and len(drawn.looks) == 2
    page = tmp_path / "p.md"
    page.write_text("a\n<!-- never-slower -->\n<!-- /never-slower -->\nb\n")
    assert command.main(["never-slower", "--results", str(path), "--page", str(page)]) == 2
    assert "no measurement of speed; no page" in capsys.readouterr().err
    found.measurement_of_speed = True
    results.write(found, path)
    command.main(["never-slower", "--results", str(path), "--page", str(page)])
    assert page.read_text().startswith("a\n<!-- never-slower -->\n8 x CPU")
    assert page.read_text().endswith("<!-- /never-slower -->\nb\n")


def test_parts_of_a_draw_are_summarised_together(tmp_path, capsys):
    paths = [tmp_path / f"{which}.json" for which in (1, 2)]
    for which, path in enumerate(paths, start=1):
        drawn = ["--random", "5", "--seed", "5", "--batch", "5", "--part", f"{which}/2"]
        assert run(path, *drawn) in (0, 1)
    assert [len(results.read(path).measurements) for path in paths] == [3, 2]
    capsys.readouterr()
    command.main(["never-slower", "--results", *map(str, paths)])
    out = capsys.readouterr().out
    assert out.count("cases done") == 1 and "5 of 5 cases done" in out


def test_other_processes_compile_and_what_they_compiled_is_kept(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "compiled"
    drawn = ["--random", "2", "--seed", "5", "--processes", "1", "--compiled", str(folder)]
    assert run(tmp_path / "r.json", *drawn) in (0, 1)
    assert "1 processes took" in capsys.readouterr().err
    files = sorted(folder.glob("*/*"))
    assert len([path for path in files if path.suffix == ".case"]) == 2
    for one in results.read(tmp_path / "r.json").measurements:
        # Their results were compared with XLA's, which this process compiled.
        assert [timed.peer for timed in one.timed] == ["auto", "xla", DRAWN]
        assert one.of(DRAWN).relative_error < 0.02 and len(one.of(DRAWN).looks) == 2
    written = {path: path.stat().st_mtime_ns for path in files}
    assert run(tmp_path / "again.json", *drawn) in (0, 1)
    assert {path: path.stat().st_mtime_ns for path in sorted(folder.glob("*/*"))} == written
    # A program holds addresses of its process: where they differ, it is compiled here.
    monkeypatch.setattr(stored, "addresses", lambda: (1, 2))
    monkeypatch.setattr(stored, "load", None)
    assert run(tmp_path / "others.json", *drawn) in (0, 1)
    assert not any(one.missing for one in results.read(tmp_path / "others.json").measurements)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "-1"], "--processes -1 must be at least 0"),
        (["--compiled", "x"], "--compiled keeps what --processes N compile"),
        (["--devices", "99"], "--devices 99 must be from 1 to"),
        (["--kernels", "matmul"], "kernel 'matmul' is not one of"),
        (["--random", "0"], "--random 0 must be at least 1"),
        (["--resume"], "name it with --json"),
        (["--part", "3/2"], "--part '3/2' must be such as 2/3"),
        (["--batch", "0"], "--batch 0 must be at least 1"),
        (["--dtype", "int8"], "--dtype 'int8' is not one of"),
    ],
)
def test_misuse_is_refused(options, message, capsys):
    assert command.main(["never-slower", *options]) == 2
    assert message in capsys.readouterr().err


def test_which_configurations_are_drawn_comes_from_the_seed_and_the_case():
    case = case_of("matmul_all_reduce", "4096x4096x4096", dtype="bfloat16")
    peers = [candidates.peer(draw_of(seed=seed, candidates=4)) for seed in (1, 1, 2)]
    one, again, other = (
        [found.config for found in peer.candidates(case, mesh_of(2))] for peer in peers
    )
    assert one == again != other and len(set(one)) == 4
    everything = candidates.peer(draw_of(candidates=10_000)).candidates(case, mesh_of(2))
    assert len({found.config for found in everything}) == len(everything) > 4
