"""What a process of a job does before JAX is used."""

from __future__ import annotations

import pytest

from stretto.launch.process.startup import Process, has_one_gpu


@pytest.mark.parametrize(
    ("given", "gpus", "one"),
    [((0,), 4, True), ((1,), 1, True), ((0, 1), 4, False), (None, 1, True), (None, 4, False)],
)
def test_a_process_per_gpu(given, gpus, one, tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    lines = [f"echo 'GPU {i}: H100 (UUID: GPU-{i})'" for i in range(gpus)]
    smi.write_text("\n".join(["#!/bin/sh", *lines]))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    process = Process(num_processes=4, local_device_ids=given)
    assert has_one_gpu(process, {}) is one


def test_a_process_without_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    assert not has_one_gpu(Process(num_processes=4), {"JAX_PLATFORMS": "cpu"})
