"""`stretto tune`: what is measured, what is written, and what is gone on with."""

from __future__ import annotations

import dataclasses
import json

import pytest

from stretto.benchmarks.cases.case import OPERATIONS, Case, Operation
from stretto.benchmarks.cases.shapes import Shape
from stretto.benchmarks.commands import tune as tune_command
from stretto.benchmarks.errors import BenchmarkError, UnavailableError
from stretto.benchmarks.measurements import results, tuned_file
from stretto.benchmarks.timing.measure import Settings
from stretto.benchmarks.timing.tune import candidates_of, config_type_of, kernel_named, tune
from stretto.kernels.choice import tables
from stretto.kernels.choice.tables import Entry, Table
from stretto.kernels.fused.all_gather_matmul import Config

QUICK = Settings(repeats=2, rest_s=0.0)


def case_of(shape=None) -> Case:
    return Case(
        operation=OPERATIONS["all_gather_matmul"],
        shape=shape or Shape(64, 32, 32),
        dtype="float32",
        devices=2,
    )


@pytest.fixture
def configured(monkeypatch):
    """Makes `Operation.public` depend on its config, a plain number: a factor on the result."""
    unfused = OPERATIONS["all_gather_matmul"].unfused

    def public(self, backend, config=None):
        if config.factor == 0:
            raise ValueError("factor=0 cannot be")

        def slow(lhs, rhs):
            return sum(unfused(lhs + i, rhs) for i in range(config.work)) * config.factor

        return slow if config.work > 1 else lambda lhs, rhs: unfused(lhs, rhs) * config.factor

    monkeypatch.setattr(Operation, "public", public)


@dataclasses.dataclass(frozen=True)
class Fake:
    work: int = 1
    factor: float = 1.0


def tuned(configs, **settings):
    return tune(case_of(), configs, dataclasses.replace(QUICK, **settings), {"jax": "1"})


def test_the_fastest_right_configuration_is_kept(configured):
    entry = tuned([Fake(factor=1.1), Fake(work=64), Fake()])
    assert entry.config == {"work": 1, "factor": 1.0}
    assert entry.fused_us > 0
    assert entry.xla_us > 0
    assert (entry.m, entry.k, entry.n, entry.devices) == (64, 32, 32, 2)


def test_without_a_right_one_the_case_is_skipped(configured):
    with pytest.raises(UnavailableError, match="its result is wrong"):
        tuned([Fake(factor=1.1), Fake(factor=1.2)])


def test_a_table_is_filled_and_gone_on_with(tmp_path, capsys):
    path = tmp_path / "t.toml"
    base = ["all_gather_matmul", "--devices", "2", "--output", str(path), "--repeats", "1"]
    assert tune_command.main([*base, "--shapes", "64x64x128"]) == 0
    first = tables.read(path)
    assert [entry.m for entry in first.entries] == [64]
    config = tables.config_from_data(Config, first.entries[0].config)
    assert config in Config.candidates()
    capsys.readouterr()
    assert tune_command.main([*base, "--shapes", "64x64x128,128x64x128,63x64x128"]) == 0
    out = capsys.readouterr().out
    assert "2 of 3 cases to tune" in out
    assert "skipped, m=63 is not a multiple of 2" in out
    second = tables.read(path)
    assert second.entries[0] == first.entries[0]
    assert [entry.m for entry in second.entries] == [64, 128]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "kernel 'nothing' is not one of"),
        (["all_gather_matmul", "--devices", "x"], "are not like 1,2,4"),
        (["all_gather_matmul", "--devices", "64", "--output", "x.toml"], "64 and 8 are present"),
        (["all_gather_matmul"], "there are no GPUs to tune for"),
    ],
)
def test_misuse_is_one_line_and_status_2(options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tune_command.main(options) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert [line for line in captured.err.splitlines() if line.startswith("stretto ")] == [
        captured.err.splitlines()[-1]
    ]
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_another_gpus_table_is_left_alone(tmp_path, capsys):
    path = tmp_path / "t.toml"
    tuned_file.write(Table("NVIDIA H200"), path)
    assert tune_command.main(["all_gather_matmul", "--output", str(path)]) == 2
    assert "is for 'NVIDIA H200', the devices are 'cpu'" in capsys.readouterr().err
    path.write_text("schema = ")
    assert tune_command.main(["all_gather_matmul", "--output", str(path)]) == 2
    assert "damaged" in capsys.readouterr().err


def test_what_is_written_is_read_back(tmp_path):
    entries = [
        Entry(
            op="all_gather_matmul",
            m=m,
            k=8192,
            n=8192,
            dtype="bfloat16",
            devices=4,
            fused_us=1.5,
            xla_us=2.25,
            config={"tiles": {"tile_m": 128, "wide": True, "name": 'a "b"'}, "list": [1, 2]},
            versions={"jax": "0.11.2", "nvidia-nccl-cu13": "2.29", "odd name": "1"},
        )
        for m in (4096, 512, 4096)
    ]
    table = Table("NVIDIA H100 80GB HBM3")
    for entry in entries:
        table = tuned_file.merged(table, entry)
    tuned_file.write(table, tmp_path / "t.toml")
    assert [entry.m for entry in table.entries] == [512, 4096]
    assert tables.read(tmp_path / "t.toml") == table


def test_a_kernel_without_configurations_cannot_be_tuned():
    with pytest.raises(BenchmarkError, match="has no configurations to tune"):
        config_type_of("nothing")


def test_candidates_may_depend_on_the_problem_or_not():
    problem = case_of().problem("gpu", "NVIDIA H100")

    class OfProblem:
        @staticmethod
        def candidates(problem):
            yield from (problem.m, problem.m, 7)

    class OfAny:
        @staticmethod
        def candidates():
            yield from (7, 8)

    assert candidates_of(OfProblem, problem) == [64, 7]
    assert candidates_of(OfAny, problem) == [7, 8]
    assert all(c.whole or c.apart for c in candidates_of(Config, problem))  # of few rows


def test_the_shipped_tables_can_be_read_and_fit_their_kernels():
    for path in sorted(tables.folder().glob("*.toml")):
        table = tables.read(path)
        assert tables.file_name(table.device_kind) == path.name
        for entry in table.entries:
            tables.config_from_data(config_type_of(entry.op), entry.config).check(2)


def test_a_table_is_made_from_what_the_benchmark_measured(tmp_path, make_results, capsys):
    found = make_results(kernels=("all_gather_matmul", "all_reduce"))
    for measurement in found.measurements:
        kernel = kernel_named(measurement.kernel)
        config = tables.config_to_data(kernel.Config())
        fused = measurement.of("fused")
        fused.backend, fused.config = "pallas", json.dumps(config)
    found.measurements[-1].of("fused").backend = "xla"  # served by XLA: no entry
    results.write(found, tmp_path / "r.json")
    path = tmp_path / "t.toml"
    options = ["--results", str(tmp_path / "r.json"), "--output", str(path)]
    assert tune_command.main(["all_reduce", *options]) == 0
    only = tables.read(path).entries
    assert {entry.op for entry in only} == {"all_reduce"}
    assert tune_command.main(options) == 0
    table = tables.read(path)
    assert len(table.entries) == len(found.measurements) - 1
    for entry in table.entries:
        tables.config_from_data(kernel_named(entry.op).Config, entry.config).check(2)
    gather = [e for e in table.entries if e.op == "all_gather_matmul" and e.devices == 4]
    assert all(entry.ratio < 1 and entry.versions["jax"] == "0.11.2" for entry in gather)
    # Entries that are there stay, unless asked otherwise.
    found.measurements[0].of("fused").time = 7.0
    results.write(found, tmp_path / "r.json")
    assert tune_command.main(options) == 0
    assert tables.read(path) == table
    assert tune_command.main([*options, "--retune"]) == 0
    assert any(entry.fused_us == 7.0 for entry in tables.read(path).entries)


def test_a_collective_is_tuned_too(tmp_path):
    """Its entry has the size of one device's operand, by which calls look it up."""
    path = tmp_path / "t.toml"
    options = ["all_gather", "--devices", "2", "--output", str(path), "--repeats", "1"]
    assert tune_command.main([*options, "--shapes", "64x64", "--candidates", "2"]) == 0
    (entry,) = tables.read(path).entries
    assert (entry.m, entry.k, entry.n) == (32, 0, 64)
    config_type = config_type_of("all_gather")
    config = tables.config_from_data(config_type, entry.config)
    assert config in list(config_type.candidates())[:2]
    gather = OPERATIONS["all_gather"]
    same = Case(operation=gather, shape=Shape(32, 0, 128), dtype="bfloat16", devices=2)
    assert entry.distance(same.problem("gpu", "")) == 0  # as many bytes
