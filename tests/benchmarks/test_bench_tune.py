"""`stretto tune`: what is measured, what is written, and what is gone on with."""

from __future__ import annotations

import dataclasses
import json

import pytest
from bench_cases import case_of

from stretto.benchmarks.commands import tune as tune_command
from stretto.benchmarks.errors import UnavailableError
from stretto.benchmarks.measurements import results, tuned_file
from stretto.benchmarks.timing.compiling import Compiler
from stretto.benchmarks.timing.measure import Settings
from stretto.benchmarks.timing.tune import configs_for, prepare, take
from stretto.kernels.choice import by_table, config_data, tables
from stretto.kernels.choice.tables import Entry, Table
from stretto.kernels.engine.blackwell.tile_config import TileConfig as BlackwellTiles
from stretto.kernels.fused.all_gather_matmul import Config
from stretto.kernels.operations import KNOWN, OPERATIONS
from stretto.kernels.operations.matmuls import all_gather_matmul
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types

QUICK = Settings(repeats=2, rest_s=0.0)


@dataclasses.dataclass(frozen=True)
class Fake:
    work: int = 1
    factor: float = 1.0


def public(*operands, config=None, **keywords):
    """An all-gather matmul whose time and result depend on its configuration."""
    times = 1 if config is None else config.work
    factor = 1.0 if config is None else config.factor
    lhs, rhs, axis = operands
    keywords["backend"] = "xla"
    sums = (all_gather_matmul(lhs + i, rhs, axis, **keywords) for i in range(times))
    return sum(sums) * factor


def tuned(configs, **settings):
    case = case_of()
    case = dataclasses.replace(case, operation=dataclasses.replace(case.operation, public=public))
    settings = dataclasses.replace(QUICK, **settings)
    with Compiler() as compiler:
        prepared = prepare(case, configs, settings, compiler)
        compiler.wait()
        return take(prepared, settings, {"jax": "1"})


def test_the_fastest_right_configuration_is_kept():
    entry = tuned([Fake(factor=1.1), Fake(work=64), Fake()])
    assert entry.config == {"work": 1, "factor": 1.0}
    assert entry.fused_us > 0
    assert entry.xla_us > 0
    assert (entry.sizes, entry.devices) == ({"m": 64, "k": 32, "n": 32}, 2)


def test_without_a_right_one_the_case_is_skipped():
    with pytest.raises(UnavailableError, match="its result is wrong"):
        tuned([Fake(factor=1.1), Fake(factor=1.2)])


def test_a_table_is_filled_and_gone_on_with(tmp_path, capsys):
    path = tmp_path / "t.toml"
    base = ["all_gather_matmul", "--devices", "2", "--output", str(path), "--repeats", "1"]
    assert tune_command.main([*base, "--shapes", "64x64x128"]) == 0
    first = tables.read(path)
    assert [entry.sizes["m"] for entry in first.entries] == [64]
    config = config_data.from_data(Config, first.entries[0].config)
    assert config in configs_for(case_of(shape="64x64x128", dtype="bfloat16"), Machine.of_mesh())
    capsys.readouterr()
    assert tune_command.main([*base, "--shapes", "64x64x128,128x64x128,63x64x128"]) == 0
    out = capsys.readouterr().out
    assert "2 of 3 cases to tune" in out
    assert "skipped, m=63 is not a multiple of 2" in out
    second = tables.read(path)
    assert second.entries[0] == first.entries[0]
    assert [entry.sizes["m"] for entry in second.entries] == [64, 128]


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
            sizes={"m": m, "k": 8192, "n": 8192},
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
    assert [entry.sizes["m"] for entry in table.entries] == [512, 4096]
    assert tables.read(tmp_path / "t.toml") == table


def test_what_is_tried_depends_on_the_problem():
    case, machine = case_of(dtype="bfloat16"), Machine.of_kind("gpu", "NVIDIA H100")
    configs = configs_for(case, machine)
    assert len(set(configs)) == len(configs)
    assert all(isinstance(config, Config) for config in configs)
    long = configs_for(case_of(shape="8192x8192x8192", dtype="bfloat16"), machine)
    assert configs != long


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "grouped_matmul"])
def test_what_is_tried_is_for_the_architecture(name):
    """And comes back as it was out of the table that `stretto tune` writes."""
    machine = Machine.of_kind("gpu", "NVIDIA B200")
    shape = "8192x8192x8192" + ("x8" if name == "grouped_matmul" else "")
    case = case_of(name, shape=shape, dtype="bfloat16")
    kernel = OPERATIONS[name].kernels[0]
    for config in configs_for(case, machine):
        assert isinstance(config.tiles, BlackwellTiles)
        config.check(case.problem(machine))
        data = config_data.to_data(config)
        assert config_data.from_data(kernel.Config, data, machine.architecture) == config


def test_what_no_kernel_serves_is_not_tuned():
    with pytest.raises(UnavailableError, match="float32"):
        configs_for(case_of(dtype="float32"), Machine.of_kind("gpu", "NVIDIA H100"))


def test_the_shipped_tables_can_be_read_and_fit_their_kernels():
    for path in sorted(tables.folder().glob("*.toml")):
        table = tables.read(path)
        assert tables.file_name(table.device_kind) == path.name
        for entry in table.entries:
            check_fits(entry, table.device_kind)


def check_fits(entry, kind):
    """Fails unless an entry's configuration is one of a kernel that serves its problem."""
    operation = KNOWN[entry.op]
    scales = operation.examples.scales
    out = entry.dtype if scales is None else "bfloat16"
    types = Types(lhs=entry.dtype, rhs=entry.dtype, out=out, scales=scales)
    machine = Machine.of_kind("gpu", kind)
    problem = Problem(
        operation=entry.op,
        sizes=entry.sizes,
        types=types,
        devices=entry.devices,
        machine=machine,
    )
    serving = [kernel for kernel in operation.kernels if kernel.obstacle(problem) is None]
    assert any(by_table.is_of(entry, kernel, problem) for kernel in serving)


def test_a_table_is_made_from_what_the_benchmark_measured(tmp_path, make_results, capsys):
    found = make_results(kernels=("all_gather_matmul", "all_reduce"))
    for measurement in found.measurements:
        kernel = OPERATIONS[measurement.kernel].kernels[0]
        config = config_data.to_data(kernel.Config())
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
        check_fits(entry, table.device_kind)
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
    assert entry.sizes == {"m": 32, "n": 64}
    kernel = OPERATIONS["all_gather"].kernels[0]
    config = config_data.from_data(kernel.Config, entry.config)
    assert config in list(kernel.candidates(None))[:2]
    same = case_of("all_gather", "32x128", dtype="bfloat16").problem(Machine.of_mesh())
    assert entry.distance(same) == 0  # as many bytes
