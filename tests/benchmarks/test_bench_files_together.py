"""Several results files together: of other numbers of devices, in any order."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from stretto.benchmarks.commands import bench as command
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements import machine, merging, results
from stretto.benchmarks.pages import terminal

DRAWN = ("all_gather_matmul", "all_reduce")


def of_devices(found, devices, **machine):
    """Those of `found` on so many devices, as of a machine or a part of one that has no more."""
    found.machine = msgspec.structs.replace(found.machine, num_devices=devices, **machine)
    found.measurements = [m for m in found.measurements if m.devices == devices]
    return found


def test_a_scaling_study_is_shown_and_merged(tmp_path, make_results, capsys):
    """Whose files are of different numbers of devices."""
    parts = [of_devices(make_results(kernels=DRAWN[:1]), devices) for devices in (1, 4, 2)]
    paths = [tmp_path / f"{part.machine.num_devices}.json" for part in parts]
    for path, part in zip(paths, parts, strict=True):
        results.write(part, path)
    assert command.main(["show", *map(str, paths)]) == 0
    out = capsys.readouterr().out
    for devices in (1, 2, 4):
        assert f"{devices} x NVIDIA H100 80GB HBM3, one process" in out
        assert f"8192x8192x8192 bfloat16, {devices} device" in out
    merged = tmp_path / "all.json"
    pictures = ["--plot", str(tmp_path / "pictures")]
    assert command.main(["show", *map(str, paths), "--merge", str(merged), *pictures]) == 0
    assert results.read(merged).machine == parts[1].machine
    assert (tmp_path / "pictures" / f"scaling-{DRAWN[0]}.svg").exists()


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ((1, 2), (1, 4), True),  # (processes, devices)
        ((1, 1), (4, 4), True),
        ((2, 2), (4, 4), True),
        ((2, 8), (4, 16), True),
        ((1, 4), (2, 8), True),
        ((1, 4), (4, 4), False),
        ((1, 2), (4, 4), False),
        ((2, 8), (8, 8), False),
    ],
)
def test_devices_of_a_process_are_as_many_in_files_that_are_merged(make_results, one, other, alike):
    made = []
    for processes, devices in (one, other):
        found = make_results(kernels=DRAWN[:1])
        layout = machine.layout(processes, devices)
        of_devices(found, devices, num_processes=processes, layout=layout)
        made.append(found)
    for pair in (made, made[::-1]):
        if alike:
            assert merging.merged(pair).machine.num_devices == max(one[1], other[1])
        else:
            with pytest.raises(BenchmarkError, match="results of different machines: layout"):
                merging.merged(pair)


def test_a_single_device_does_not_join_layouts_that_differ(make_results):
    made = [make_results(kernels=DRAWN[:1]) for _ in range(3)]
    for found, (processes, devices) in zip(made, ((1, 1), (1, 4), (4, 4)), strict=True):
        layout = machine.layout(processes, devices)
        of_devices(found, devices, num_processes=processes, layout=layout)
    with pytest.raises(BenchmarkError, match="results of different machines: layout"):
        merging.merged(made)


def test_merged_with_a_rehearsal_is_no_measurement(make_results):
    made = [make_results(kernels=DRAWN[:1]) for _ in range(2)]
    made[1].measurement_of_speed = False
    assert not merging.merged(made).measurement_of_speed


def test_documents_do_not_depend_on_the_order_of_the_files(tmp_path, make_results, capsys):
    """Nor which of two times of a case is taken, nor of which machine the pictures are."""
    old, new = make_results(slower=2.0, kernels=DRAWN), make_results(kernels=DRAWN)
    new.start_time = "2026-02-02T03:04:05+00:00"
    two = of_devices(make_results(kernels=DRAWN[:1]), 2, card="NVIDIA H200")
    two.start_time = "2026-03-02T03:04:05+00:00"
    paths = [tmp_path / name for name in ("new.json", "two.json", "old.json")]
    for path, one in zip(paths, (new, two, old), strict=True):
        results.write(one, path)
    readme, page = tmp_path / "README.md", tmp_path / "performance.md"
    readme.write_text("<!-- times -->\n<!-- /times -->\n")
    options = ["--readme", str(readme), "--page", str(page), "--machines", str(tmp_path / "all")]
    assert command.main(["document", *map(str, paths), *options]) == 0
    for order in itertools.permutations(paths):
        assert command.main(["document", *map(str, order), *options, "--check"]) == 0
    assert "document old.json new.json two.json`" in page.read_text()
    assert "on 2 devices (2 x NVIDIA H200" in readme.read_text()  # The last run.
    assert "\n- 2 x NVIDIA H200" in page.read_text()
    measurement = next(m for m in two.measurements if m.key[0] == DRAWN[0])
    assert terminal.number(measurement.of("fused").time) in readme.read_text()
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "pictures").iterdir()}
    assert command.main(["document", *map(str, reversed(paths)), *options]) == 0
    assert drawn == {path.name: path.read_bytes() for path in (tmp_path / "pictures").iterdir()}
