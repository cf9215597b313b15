"""A process keeps to the cores beside its GPUs, as /sys names them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stretto.launch.planning.gpus import Gpu
from stretto.launch.process import binding

GPUS = [Gpu(i, "H100", f"GPU-{i}") for i in range(4)]
ADDRESSES = ("00000000:17:00.0", "00000000:3D:00.0", "00000000:97:00.0", "00010000:BD:00.0")
NODES, CORES = (0, 0, 1, 1), {0: "0-3,8\n", 1: "4-7,9-11\n"}


def machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...] = NODES, sockets: int = 2
) -> Path:
    """A /sys with two sockets and four GPUs, and their nvidia-smi on PATH."""
    rows = "".join(f"{i}, {address}\n" for i, address in enumerate(ADDRESSES))
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncase $1 in -L) echo no;; *) cat <<'E'\n{rows}E\nesac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for socket in range(sockets):
        (folder / "devices" / "system" / "node" / f"node{socket}").mkdir(parents=True)
    for address, node in zip(ADDRESSES, nodes, strict=True):
        device = folder / "bus" / "pci" / "devices" / address[4:].lower()
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        (device / "local_cpulist").write_text(CORES.get(node, "0-11\n"))
    return folder


@pytest.mark.parametrize(
    ("devices", "cores"),
    [
        ((0,), {0, 1, 2, 3, 8}),
        ((2, 3), {4, 5, 6, 7, 9, 10, 11}),
        ((1, 2), set(range(12))),
        ((0, 1, 2, 3), set(range(12))),
    ],
)
def test_cores_beside_gpus(tmp_path, monkeypatch, devices, cores):
    folder = machine(tmp_path, monkeypatch)
    assert binding.cores_beside([GPUS[i] for i in devices], folder) == cores


def test_machine_that_does_not_say(tmp_path, monkeypatch):
    folder = machine(tmp_path, monkeypatch, nodes=(-1, -1, -1, -1))
    assert binding.cores_beside(GPUS[:1], folder) is None
    (tmp_path / "nvidia-smi").unlink()
    assert binding.cores_beside(GPUS[:1], folder) is None


def test_one_socket_needs_no_answer(tmp_path, monkeypatch):
    folder = machine(tmp_path, monkeypatch, nodes=(0, 0, 0, 0), sockets=1)
    assert binding.cores_beside(GPUS[:1], folder) is None


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-2,5\n", {0, 1, 2, 5}), ("7", {7}), ("\n", set()), ("0-1,4-5", {0, 1, 4, 5})],
)
def test_cores_as_the_kernel_writes_them(text, cores):
    assert binding.parse_cores(text) == cores


def test_process_keeps_to_what_it_may_use():
    """In a process of its own: what it starts inherits it."""
    import multiprocessing

    own = min(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(binding.keep_to, ({own, 100_000},))
        assert pool.apply(os.sched_getaffinity, (0,)) == {own}
        assert not pool.apply(binding.keep_to, ({100_000},))  # not one of its own: it stays
        assert pool.apply(os.sched_getaffinity, (0,)) == {own}
