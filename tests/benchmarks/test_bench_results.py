"""Result files, figures, comparison, and what is written from results."""

from __future__ import annotations

import html.parser
import importlib.util
import json
import pathlib
import re

import pytest

from stretto.benchmarks.commands import bench as command
from stretto.benchmarks.commands import compare
from stretto.benchmarks.commands.compare import Verdict
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements import figures, results
from stretto.benchmarks.measurements.spread import median_ratio, spread
from stretto.benchmarks.pages import machines, performance, plots, report
from stretto.benchmarks.pages import terminal as table

DRAWN = ("all_gather_matmul", "all_reduce")


def test_a_file_is_read_back_as_it_was_written(tmp_path, make_results):
    written = make_results()
    path = tmp_path / "deep" / "r.json"
    results.write(written, path)
    assert results.read(path) == written
    assert [entry.name for entry in path.parent.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "damaged, not JSON"),
        ("[]", "schema is None"),
        ('{"schema": "stretto-bench/0"}', "schema is 'stretto-bench/0', this version reads"),
        ('{"schema": "stretto-bench/1"}', r"damaged: .*start_time"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(tmp_path, text, message):
    path = tmp_path / "r.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BenchmarkError, match=message):
        results.read(path)


def test_a_field_of_the_wrong_type_is_named(tmp_path, make_results):
    path = tmp_path / "r.json"
    results.write(make_results(), path)
    data = json.loads(path.read_text())
    data["measurements"][0]["timed"][0]["time"] = "fast"
    path.write_text(json.dumps(data))
    with pytest.raises(BenchmarkError, match=r"timed\[0\]\.time|timed\[...\]\.time"):
        results.read(path)


def test_spread_and_pairs():
    assert spread([1.0, 2.0, 3.0]).median == 2.0
    times = spread(range(101))
    assert (times.p10, times.p90) == (10.0, 90.0)
    with pytest.raises(ValueError, match="no samples"):
        spread([])
    # Drift that doubles both leaves the ratio of pairs.
    assert median_ratio([1.0, 2.0, 4.0], [2.0, 4.0, 8.0]) == 0.5


def test_figures_of_a_fused_matmul(make_results):
    found = make_results().measurements
    case = next(m for m in found if m.kernel == "all_gather_matmul" and m.devices == 4)
    fused, matmul, moved = case.of("fused"), case.of("matmul"), case.of("communication")
    assert case.matmul_floor == min(matmul.time, case.of("own-matmul").time)
    assert case.floor == max(case.matmul_floor, case.communication_floor)
    assert fused.share_of_floor == pytest.approx(case.floor / fused.time)
    assert fused.tflops == pytest.approx(case.flops / fused.time / 1e6)
    assert fused.exposed == pytest.approx(fused.time - case.matmul_floor)
    hidden = case.matmul_floor + moved.time - fused.time
    assert fused.overlap_efficiency == pytest.approx(hidden / min(case.matmul_floor, moved.time))
    assert matmul.share_of_floor is None
    assert 0.4 < fused.over_xla < 0.7


def test_a_kernel_that_multiplies_faster_than_the_matmuls_alone_lowers_the_floor(
    make_results, tmp_path
):
    found = make_results()
    case = next(m for m in found.measurements if m.kernel == "all_gather_matmul")
    fused, alone = case.of("fused"), case.matmul_floor
    fused.time = 0.9 * alone
    fused.share_of_floor = case.floor / fused.time
    fused.intervals["share_of_floor"] = (1.05, 1.15)
    assert fused.share_of_floor > 1
    path = tmp_path / "recorded.json"
    results.write(found, path)
    case = results.read(path).measurements[found.measurements.index(case)]
    fused, xla = case.of("fused"), case.of("xla")
    assert case.floor == fused.time and case.matmul_floor == alone
    assert fused.share_of_floor == 1 and "share_of_floor" not in fused.intervals
    assert xla.share_of_floor == pytest.approx(fused.time / xla.time)
    assert "the fastest of the row" in table.floor_sentence(case)


def test_bandwidths_are_those_of_nccl_tests(make_results):
    for kernel, factor in (("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75)):
        case = next(m for m in make_results().measurements if m.kernel == kernel and m.devices == 4)
        fused = case.of("fused")
        assert fused.alg_bw == pytest.approx(case.size / fused.time / 1e3)
        assert fused.bus_bw == pytest.approx(fused.alg_bw * factor)


def test_scaling_efficiencies():
    assert figures.strong_scaling(400.0, 125.0, 4) == 0.8
    assert figures.weak_scaling(100.0, 125.0) == 0.8
    assert figures.overlap_efficiency(400.0, 360.0, 380.0) == pytest.approx(340 / 360)


def test_strong_and_weak_cases_are_found(make_results):
    measurements = make_results().measurements
    strong = figures.strong_efficiencies(measurements, "fused")
    row = strong[("all_gather_matmul", "8192x8192x8192", "bfloat16")]
    assert set(row) == {1, 2, 4}
    assert row[1] == 1.0
    assert 0.9 < row[4] < 1.1
    # A quarter of the rows on one device, all of them on four.
    weak = figures.weak_efficiencies(measurements, "fused")
    assert set(weak[("all_gather_matmul", "2048x8192x28672", "bfloat16")]) == {1, 4}
    assert set(weak[("all_gather_matmul", "8192x8192x28672", "bfloat16")]) == {1}


def test_compare_finds_what_changed(make_results):
    before, after = make_results(), make_results(slower=1.1)
    changes = {
        (c.measurement.key, (c.after or c.before).peer): c
        for c in compare.compare(before, after, 3)
    }
    for (_, peer), change in changes.items():
        expected = Verdict.REGRESSION if peer == "fused" else Verdict.EQUAL
        assert change.verdict is expected
    assert all(
        c.percent == pytest.approx(10, abs=1) for (_, p), c in changes.items() if p == "fused"
    )
    back = compare.compare(after, before, 3)
    assert {c.verdict for c in back if c.after.peer == "fused"} == {Verdict.FASTER}
    small = compare.compare(before, make_results(slower=1.02), 3)
    assert {c.verdict for c in small if c.after.peer == "fused"} == {Verdict.SLOWER}


def test_compare_exits_1_on_a_regression_only(tmp_path, make_results, capsys):
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    results.write(make_results(), paths[0])
    results.write(make_results(slower=1.1), paths[1])
    names = [str(path) for path in paths]
    assert command.main(["compare", *names]) == 1
    assert "regression" in capsys.readouterr().out
    assert command.main(["compare", *names, "--threshold", "20"]) == 0
    assert command.main(["compare", names[1], names[0]]) == 0
    assert command.main(["compare", names[0], names[0]]) == 0
    out = capsys.readouterr().out
    count = sum(len(measurement.timed) for measurement in make_results().measurements)
    assert f"{count} times compared, {count} equal" in out.splitlines()[-1]


def test_compare_counts_a_lost_time_and_names_what_differs(make_results):
    before, after = make_results(), make_results()
    lost = after.measurements[0].of("fused")
    after.measurements[0].timed.remove(lost)
    after.measurements[0].missing.append(results.Missing(peer="fused", reason="it failed"))
    after.machine.versions["jax"] = "0.12.0"
    changes = compare.compare(before, after, 3)
    assert [c.before.peer for c in changes if c.verdict is Verdict.GONE] == ["fused"]
    assert compare.differences(before, after) == ["jax 0.11.2 and 0.12.0"]


def test_the_documents_are_made_from_the_results(tmp_path, make_results, capsys):
    path, readme, page = (tmp_path / name for name in ("r.json", "README.md", "performance.md"))
    results.write(make_results(kernels=DRAWN), path)
    readme.write_text("before\n<!-- times -->\nold\n<!-- /times -->\nafter\n")
    every = tmp_path / "machines"
    options = [str(path), "--readme", str(readme), "--page", str(page), "--machines", str(every)]
    assert command.main(["document", *options, "--check"]) == 1
    assert not page.exists()
    assert command.main(["document", *options]) == 0
    text = readme.read_text()
    assert text.startswith("before\n<!-- times -->\nMicroseconds on 4 devices")
    assert text.endswith("<!-- /times -->\nafter\n")
    assert "\nold\n" not in text
    assert "| `all_gather_matmul` | 8192x8192x8192 |" in text
    assert len(re.findall("^[|] `", text, re.MULTILINE)) <= performance.README_ROWS
    machine = (every / "nvidia-h100-80gb-hbm3-one-process.md").read_text()
    assert "Strong scaling" in machine and "`all_reduce`, 4 devices" in machine
    assert "(nvidia-h100-80gb-hbm3-one-process.md)" in (every / "index.md").read_text()
    assert "## all_reduce" in page.read_text()
    assert "| Stretto, us | `auto`, us | XLA, us |" in page.read_text()
    for picture in ("latency-all_reduce.svg", "scaling-all_gather_matmul.svg", "roofline.svg"):
        assert (tmp_path / "pictures" / picture).read_text().startswith("<?xml")
        assert f"(pictures/{picture})" in page.read_text()
    assert command.main(["document", *options, "--check"]) == 0


def test_the_page_of_a_machine_has_the_clocks_that_its_cards_told(make_results):
    found = make_results()
    (text, _) = machines.pages([found], ["r.json"]).values()
    assert "MHz" not in text
    one = found.measurements[0]
    one.most_mhz, one.timed[0].mhz, one.timed[1].mhz = 1980, 1980.0, 1455.0
    one.timed[1].at_power_limit = 0.25
    (text, _) = machines.pages([found], ["r.json"]).values()
    clocks = (
        "clocks 1455 to 1980 of 1980 MHz, lowered by the power limit in up to 25% of the visits"
    )
    assert clocks in text


def test_predictions_stand_beside_measurements_in_the_documents(make_results):
    found = make_results(kernels=("all_gather_matmul",))
    one = next(m for m in found.measurements if m.devices == 4)
    for devices in (4, 8):
        sizes = {"kernel": one.kernel, "m": one.m, "k": one.k, "n": one.n, "type": one.type}
        times = {"fused": 1.5, "fused_low": 1.2, "fused_high": 1.8}
        times |= {"xla": 2.5, "xla_low": 2.2, "xla_high": 2.8}
        found.predictions.append(results.Prediction(**sizes, devices=devices, **times))
    (text, _) = machines.pages([found], ["r.json"]).values()
    time = table.number(one.of("fused").time)
    fused, xla = "1.50 (1.20 to 1.80)", "2.50 (2.20 to 2.80)"
    assert f"| `all_gather_matmul` | {one.shape} | 4 | {fused} | {time} | {xla} |" in text
    assert f"| `all_gather_matmul` | {one.shape} | 8 | {fused} | - | {xla} | - |" in text


def test_results_are_shown_merged_and_drawn_again(tmp_path, make_results, capsys):
    """On a machine that has no such devices."""
    old, new = make_results(slower=2.0, kernels=DRAWN), make_results(kernels=DRAWN[:1])
    paths = [str(tmp_path / name) for name in ("old.json", "new.json")]
    for path, one in zip(paths, (old, new), strict=True):
        results.write(one, pathlib.Path(path))
    assert command.main(["show", *paths]) == 0
    out = capsys.readouterr().out
    assert "4 x NVIDIA H100 80GB HBM3" in out
    assert "all_reduce 4096x8192 bfloat16, 4 devices" in out
    made = {name: tmp_path / name for name in ("all.json", "pictures", "r.html")}
    options = ["--merge", str(made["all.json"]), "--plot", str(made["pictures"])]
    assert command.main(["show", *paths, *options, "--report", str(made["r.html"])]) == 0
    merged = {m.key: m for m in results.read(made["all.json"]).measurements}
    assert len(merged) == len(old.measurements)
    assert all(merged[m.key] == m for m in new.measurements)
    assert (made["pictures"] / "roofline.svg").exists()
    assert "<svg" in made["r.html"].read_text()


def test_results_of_different_machines_are_not_merged(tmp_path, make_results, capsys):
    one, other = make_results(kernels=DRAWN[:1]), make_results(kernels=DRAWN[:1])
    other.machine.driver = "590.1"
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    results.write(one, paths[0])
    results.write(other, paths[1])
    assert command.main(["show", *map(str, paths)]) == 2
    assert "driver '580.1' and '590.1'; keep them in files of" in capsys.readouterr().err
    assert command.main(["show"]) == 2


def test_later_files_replace_earlier_cases(make_results):
    old, new = make_results(slower=2.0), make_results()
    new.measurements = new.measurements[:1]
    chosen = {m.key: m for _, m in performance.latest([old, new])}
    assert len(chosen) == len(old.measurements)
    assert chosen[new.measurements[0].key] is new.measurements[0]


def test_documents_refuse_what_they_should(tmp_path, make_results, capsys):
    path, readme = tmp_path / "r.json", tmp_path / "README.md"
    readme.write_text("no markers")
    results.write(make_results(), path)
    options = ["--readme", str(readme), "--page", str(tmp_path / "docs" / "p" / "p.md")]
    assert command.main(["document", str(path), *options]) == 2
    assert "<!-- times -->" in capsys.readouterr().err
    results.write(make_results(speed=False), path)
    assert command.main(["document", str(path), *options]) == 2
    assert "no measurement of speed" in capsys.readouterr().err


class _Tags(html.parser.HTMLParser):
    """Elements that are open at the end, and references to anything outside the page."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href") and not (value or "").startswith("#"):
                self.outside.append(value or "")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(make_results):
    """The report of two kernels' results, drawn once."""
    return report.page(make_results(kernels=DRAWN))


def test_the_report_is_one_well_formed_page(page, make_results):
    text = page
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.outside == []
    assert text.count("<figure") == 8
    assert "prefers-color-scheme: dark" in text
    assert "NVIDIA H100" in text
    assert table.NOT_A_MEASUREMENT not in text


def test_a_report_of_a_cpu_says_so(make_results, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    assert table.NOT_A_MEASUREMENT in report.page(make_results(speed=False))


def test_text_of_results_is_escaped(make_results, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    found = make_results()
    found.measurements[0].missing = [results.Missing(peer="torch", reason="<script>x</script>")]
    assert "<script>" not in report.page(found)


def test_pictures_take_their_ink_from_the_page_and_share_no_ids(page):
    for name in ("rate-all_gather_matmul", "share-all_reduce", "share-of-floor", "roofline"):
        assert f'aria-label="{name}"' in page
    assert "currentColor" in page
    assert "#010203" not in page
    identities = [part.split('"')[0] for part in page.split(' id="')[1:]]
    assert len(identities) == len(set(identities))


def test_pictures_without_matplotlib(tmp_path, make_results, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    with pytest.raises(BenchmarkError, match=r"install stretto\[plots\]"):
        plots.write_all(make_results(), tmp_path)
    assert "matplotlib was not installed" in report.page(make_results())
    # Said before anything is measured.
    assert command.main(["all_gather", "--plot", str(tmp_path / "p")]) == 2
    assert "stretto[plots]" in capsys.readouterr().err


def test_plots_are_written_and_the_same_each_time(tmp_path, make_results):
    found = make_results(kernels=("all_reduce",))
    first = {path.name: path.read_bytes() for path in plots.write_all(found, tmp_path / "a")}
    again = {path.name: path.read_bytes() for path in plots.write_all(found, tmp_path / "b")}
    assert first == again
    assert "latency-all_reduce.svg" in first
    assert first["bandwidth-all_reduce.png"].startswith(b"\x89PNG")
