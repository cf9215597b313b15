"""What `stretto bench`, `tune`, `explain` and `plan` refuse: a line each, before they measure."""

from __future__ import annotations

import pathlib

import msgspec
import pytest
from rich.console import Console

from stretto.benchmarks import files
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements import figures, results
from stretto.benchmarks.pages import plans
from stretto.benchmarks.scaling import decoder, plan, steps
from stretto.benchmarks.sweeps.run import Run
from stretto.benchmarks.targets import machine_file
from stretto.benchmarks.timing.measure import Settings
from stretto.kernels.operations import OPERATIONS
from stretto.launch import cli

SMALL = "bench all_gather --shapes 16x16"
TUNE = "tune all_gather --shapes 16x16 --output table.toml"
H200 = machine_file.read("hgx-h200")
PUBLISHED = (machine_file.folder() / "dgx-h100.toml").read_text()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    """The working directory, with a file that is no text and a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noise").write_bytes(b"\x95\x00\xff")
    (tmp_path / "folder").mkdir()
    (tmp_path / "nan.toml").write_text(PUBLISHED.replace("= 450.0", "= nan"))
    (tmp_path / "inf.toml").write_text(PUBLISHED.replace("= 450.0", "= inf"))
    return tmp_path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{SMALL} --repeats 0", "--repeats 0 must be at least 1"),
        (f"{SMALL} --seed -1", "--seed -1 must be at least 0"),
        (f"{SMALL} --budget nan", "--budget nan must be at least 0"),
        (f"{SMALL} --max-slowdown nan", "--max-slowdown nan must be at least -100"),
        (f"{SMALL} --rest-s -1", "--rest-s -1 must be a number of seconds from 0 on"),
        (f"{SMALL} --rest-s inf", "--rest-s inf must be a number of seconds from 0 on"),
        (f"{SMALL} --rest-s nan", "--rest-s nan must be a number of seconds from 0 on"),
        (f"{SMALL} --link-gb-per-s 0", "--link-gb-per-s 0 must be more than 0"),
        (f"{SMALL} --json noise/a.json", "--json noise/a.json cannot be written (Not a directory)"),
        (f"{SMALL} --json folder --overwrite", "--json folder cannot be written (Is a directory)"),
        (f"{SMALL} --trace folder", "--trace folder cannot be written"),
        (f"{SMALL} --report folder", "--report folder cannot be written"),
        (f"{SMALL} --plot noise", "--plot noise"),
        ("bench links --machine-out folder", "--machine-out folder cannot be written"),
        ("bench predicted --scaling noise", "noise: it is no text (UTF-8); see --scaling"),
        (f"{TUNE} --repeats 0", "--repeats 0 must be at least 1"),
        (f"{TUNE} --candidates 0", "--candidates 0 must be at least 1"),
        ("tune all_gather --shapes 16x16 --output noise/a", "--output noise/a cannot be written"),
        ("explain nothing 1x2", "operation='nothing' is not one of"),
        ("explain all_gather ²x2", "sizes '²x2' must be 2 numbers joined by x: m, n."),
        ("plan 7b --machine nan.toml", "Expected `float` > 0.0 - at `$.within.gb_per_s`"),
        ("plan 7b --machine inf.toml", "Expected `float` <= 1000000000000.0"),
        ("plan 7b --picture a.txt", "a.txt is no picture's name; let it end in .svg or .png"),
        ("plan 7b --picture noise/a.svg", "noise/a.svg cannot be written (Not a directory)"),
    ],
)
def test_one_line_says_the_way_out(capfd, line, words):
    if "--p" in line:
        pytest.importorskip("matplotlib")
    assert cli.main(line.split()) == 2
    captured = capfd.readouterr()
    (said,) = captured.err.splitlines()
    assert words in said and captured.out == ""


def test_a_picture_of_nothing_is_not_drawn(capfd, folder):
    pytest.importorskip("matplotlib")
    assert cli.main(["plan", "70b", "--gpus", "1", "--picture", "a.svg"]) == 2
    captured = capfd.readouterr()
    assert "no split fits; the least needs" in captured.out
    assert "a.svg is not drawn, since no split fits" in captured.err
    assert not (folder / "a.svg").exists()


def test_nodes_that_an_axis_does_not_fill():
    seven = msgspec.structs.replace(H200, gpus_per_node=7)
    found = plan.over(steps.step_model(), decoder.read("7b"), 8, 1024, seven)
    assert found.best
    assert any("8 devices are no whole nodes of 7" in loser.why for loser in found.losers)


def test_a_plan_in_which_nothing_fits_says_nothing_of_measurements():
    found = plan.plan(decoder.read("70b"), [1], H200, 8)
    assert plans.beyond_lines(found) == []
    assert plans.beyond_lines(plan.plan(decoder.read("7b-layer"), [2], H200, 4))


class TestFiles:
    def test_a_full_disk_leaves_what_was_there(self, folder):
        path = folder / "results.json"
        path.write_bytes(b"earlier")
        (folder / "results.json.partial").symlink_to("/dev/full")
        with pytest.raises(BenchmarkError, match="No space left on device"):
            files.write_whole(path, b"later")
        assert path.read_bytes() == b"earlier"
        assert not (folder / "results.json.partial").is_symlink()

    def test_a_disk_that_is_full_for_a_while_loses_nothing(self, folder, capsys, monkeypatch):
        path = folder / "results.json"
        run = Run(path, resume=False, overwrite=False, command=["x"], settings=Settings())
        gather = OPERATIONS["all_gather"]
        first, second = (
            figures.begin(Case(operation=gather, sizes=sizes, dtype="bfloat16", devices=4), 1)
            for sizes in ({"m": 16, "n": 16}, {"m": 32, "n": 16})
        )

        def full(*_):
            raise BenchmarkError("no room.")

        with monkeypatch.context() as changed:
            changed.setattr(results, "write", full)
            run._add(first, Console())
            with pytest.raises(BenchmarkError, match="no room"):
                run.save_what_is_due()
        assert "no room. Tried again after the next case." in capsys.readouterr().err
        run._add(second, Console())
        run.save_what_is_due()
        assert [one.key for one in results.read(path).measurements] == [first.key, second.key]
