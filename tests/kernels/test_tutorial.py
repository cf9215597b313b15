"""Each step of docs/write/halo_exchange.md: its files, and what its commands print."""

from __future__ import annotations

import importlib
import sys

import jax
import numpy as np
import pytest
import tutorial
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from stretto.kernels.operations import OPERATIONS
from stretto.launch.commands import on_cpus
from stretto.launch.commands.simulate import simulate

CLEAN, RACE, COMPILED, FALLBACK, SIMULATED, LISTED = tutorial.outputs()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The page's files, in the working folder."""
    tutorial.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in tutorial.files():
        sys.modules.pop(name.removesuffix(".py"), None)
    jax.clear_caches()


def without(line: str) -> None:
    """Takes a line out of the kernel; whoever imports it next gets the new one."""
    text = tutorial.files()["halo.py"]
    (found,) = [each for each in text.splitlines(keepends=True) if line in each]
    with open("halo.py", "w") as file:
        file.write(text.replace(found, ""))


def test_the_files_are_those_of_the_table():
    assert list(tutorial.files()) == [
        *("halo.py", "check_halo.py", "halo_operation.py", "check_operation.py", "time_halo.py")
    ]


@pytest.mark.parametrize("h", [1, 3])
def test_the_equation(folder, monkeypatch, h):
    monkeypatch.syspath_prepend(folder)
    reference = importlib.import_module("halo").reference
    mesh = Mesh(jax.devices()[:4], ("x",))
    x = np.arange(4 * 3 * 2, dtype=np.float32).reshape(4 * 3, 2)
    program = jax.shard_map(
        lambda x: reference(x, "x", h), mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    padded = np.pad(x, ((h, h), (0, 0)))
    wanted = [padded[3 * i : 3 * i + 3 + 2 * h] for i in range(4)]
    np.testing.assert_array_equal(program(x), np.concatenate(wanted))


def test_the_kernel_is_right_in_every_order(folder, capsys):
    assert simulate("check_halo.py", devices=jax.device_count(), seeds=range(4)) == 0
    out, err = capsys.readouterr()
    assert out == 4 * "right\n" and err == CLEAN


def test_without_a_wait_the_report_is_the_page_s(folder, capsys):
    without("plgpu.wait_smem_to_gmem")
    assert simulate("check_halo.py", devices=jax.device_count()) == 1
    assert RACE in capsys.readouterr().err


def test_without_the_other_wait_it_sends_what_has_not_arrived(folder, capsys):
    without("plgpu.barrier_wait")
    assert simulate("check_halo.py", devices=jax.device_count()) == 1
    err = capsys.readouterr().err
    assert "[race] race on buffers" in err and "reads buffers" in err
    assert "it takes a wait on the copy's barrier between them" in err


def test_the_operation_falls_back(folder, capsys):
    assert on_cpus.run("check_operation.py", ()) == 0
    assert capsys.readouterr().out == FALLBACK


def test_the_operation_and_its_gradient_in_the_simulator(folder, capsys):
    assert simulate("check_operation.py", devices=jax.device_count()) == 0
    out, err = capsys.readouterr()
    assert (out + err).startswith(SIMULATED)


def test_the_bench_lists_the_operation(folder, capsys, monkeypatch):
    monkeypatch.setitem(OPERATIONS, "halo_exchange", OPERATIONS["all_gather"])  # Restored later.
    assert on_cpus.run("time_halo.py", ("--list", "--devices", "4")) == 0
    assert capsys.readouterr().out == LISTED


def test_what_the_operation_refuses(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    halo_operation = importlib.import_module("halo_operation")
    record = halo_operation.HALO_EXCHANGE
    mesh = Mesh(jax.devices()[:4], ("x",))

    def call(shape, dtype="float32", **options):
        x = jax.ShapeDtypeStruct((4 * shape[0], shape[1]), dtype)
        program = jax.shard_map(
            lambda x: record.public(x, "x", **options), mesh=mesh, in_specs=P("x"), out_specs=P("x")
        )
        return jax.eval_shape(program, x).shape

    assert call((8, 100), h=2) == (4 * 12, 100)
    fused = dict(backend="simulator")
    assert call((8, 128), h=2, **fused) == (4 * 12, 128)
    for shape, options, message in [
        ((8, 128), dict(h=9), r"h=9 of x \(8, 128\); x must be a matrix with at least h >= 1"),
        ((8, 100), dict(h=2) | fused, r"h \* columns = 200 is not a multiple of 256; pad"),
        ((8, 256), dict(h=2, dtype="int8") | fused, r"elements of 16 or 32 bits, not int8"),
        (
            (8, 256),
            dict(h=3, config=halo_operation.Config(piece=2)) | fused,
            r"piece=2 must divide the 3 rows",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call(shape, **options)
