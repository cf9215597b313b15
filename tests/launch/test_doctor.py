"""The doctor's judgement of machines, healthy and not, played by fakes."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.launch import cli
from stretto.launch.doctor import command, gpu, heap, host, jax_devices, mpi, nccl, peers, software
from stretto.launch.doctor import peer_probe as probe_module
from stretto.launch.doctor.finding import Finding, error, ok
from stretto.launch.doctor.tools import Output, ask
from stretto.launch.planning.launchers import MpiRun

OPEN_MPI = MpiRun("/x/mpirun", "openmpi", (5, 0, 11))


def level(finding: Finding) -> str:
    """The level, after checking that whatever is wrong comes with a way out."""
    assert bool(finding.way_out) == (finding.level != "ok")
    return finding.level


# --- The command. ---------------------------------------------------------------------------------


def test_this_machine(capfd):
    status = cli.main(["doctor", "--json"])
    report = json.loads(capfd.readouterr().out)
    levels = {finding["topic"]: finding["level"] for finding in report["findings"]}
    assert status == (1 if "error" in levels.values() else 0)
    assert {"python", "jax", "host name", "mpirun", "mpi4py", "jax devices"} <= levels.keys()
    assert levels["python"] == levels["jax"] == levels["jax devices"] == "ok"


@pytest.mark.parametrize(("findings", "status"), [([ok("a", "b")], 0), ([error("a", "b", "c")], 1)])
def test_status_and_table(monkeypatch, capfd, findings, status):
    monkeypatch.setattr(command, "examine", lambda: findings)
    assert cli.main(["doctor"]) == status
    shown = capfd.readouterr().out
    assert f"{status} errors, 0 warnings" in shown
    assert ("→ c" in shown) == bool(status)


def test_a_check_that_breaks_is_a_finding():
    def check_luck():
        raise RuntimeError("none")

    (finding,) = command.run_check(check_luck)
    assert (finding.level, finding.text) == ("error", "check_luck failed: RuntimeError: none")


def test_tools_that_are_missing_or_slow():
    assert "No such file" in ask(["no-such-tool-here"], 5).stderr
    slow = ask([sys.executable, "-c", "import time; time.sleep(9)"], 0.3)
    assert slow.status is None
    assert "within 0.3 s" in slow.stderr
    assert ask([sys.executable, "-c", "import sys; sys.exit(3)"], 9).last_words() == "exit status 3"


# --- Software and host. ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        (software.judge_python("3.12.1"), "ok"),
        (software.judge_python("3.11.9"), "error"),
        (software.judge_jax("0.11.2", "0.11.2"), "ok"),
        (software.judge_jax("0.12.0.1", "0.12.0"), "ok"),
        (software.judge_jax("0.11.1", "0.11.1"), "error"),
        (software.judge_jax("0.13.0", "0.13.0"), "error"),
        (software.judge_jax("0.12.0", "0.11.2"), "error"),
        (software.judge_jax(None, None), "error"),
        (host.judge_name("n1", []), "error"),
        (host.judge_name("n1", ["127.0.1.1"]), "ok"),
        (host.judge_name("n1", ["10.0.0.1"]), "ok"),
        (host.judge_loopback("Network is unreachable"), "error"),
        (host.judge_memory(1 << 30), "warning"),
        (host.judge_memory(64 << 30), "ok"),
        (host.judge_shared_memory(64 << 20), "warning"),
        (host.judge_shared_memory(None), "ok"),
    ],
)
def test_software_and_host(finding, expected):
    assert level(finding) == expected


def test_variables():
    assert software.judge_variables({"XLA_FLAGS": "--xla_dump_to=/tmp"}) == []
    (finding,) = software.judge_variables({"XLA_FLAGS": "--xla_gpu_experimental_enable_nvshmem=1"})
    assert level(finding) == "error"
    (finding,) = software.judge_variables({"https_proxy": "http://p"})
    assert level(finding) == "warning"
    assert software.judge_variables({"https_proxy": "http://p", "no_proxy": "10.0.0.0/8"}) == []


# --- MPI. -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mpirun", "library", "expected"),
    [
        (OPEN_MPI, "Open MPI v5.0.11, package: x", "ok"),
        (OPEN_MPI, "Open MPI v4.1.4, package: x", "warning"),
        (OPEN_MPI, "MPICH Version:      4.2.1\nMPICH Release", "error"),
        (MpiRun("/x", "mpich", (4, 2, 1)), "MPICH Version:  4.2.1", "ok"),
        (None, "Open MPI v5.0.11", "ok"),
        (OPEN_MPI, "Some Other MPI 1.0", "ok"),
    ],
)
def test_mpi_library(mpirun, library, expected):
    assert level(mpi.judge_library(mpirun, Output(0, library, ""))) == expected


def test_no_mpi():
    assert level(mpi.judge_mpirun(None)) == "warning"
    finding = mpi.judge_library(None, Output(1, "", "x\nRuntimeError: cannot load MPI library"))
    assert level(finding) == "warning"
    assert "RuntimeError: cannot load MPI library" in finding.text


# --- GPUs. ----------------------------------------------------------------------------------------

H100 = "NVIDIA H100 80GB HBM3, GPU-a, 570.1, 9.0, 81559"
QUERY = f"0, {H100}, 4, Disabled\n1, {H100}, 40000, Disabled\n2, {H100}, 4, Enabled\n"
QUERY += "3, NVIDIA A100, GPU-b, 570.1, 8.0, 40960, [N/A], [N/A]\n"


def test_gpus():
    states = gpu.parse_query(QUERY)
    driver, free, busy, mig, old = gpu.judge_driver(states, Output(0, QUERY, ""))
    assert (driver.topic, driver.text) == ("driver", "570.1")
    assert [level(finding) for finding in (free, busy, mig, old)] == [
        "ok",
        "warning",
        "warning",
        "warning",
    ]
    assert "39.1 GiB of it in use" in busy.text
    assert "MIG" in mig.text
    assert "9.0 (Hopper)" in old.text


def test_a_gpu_that_the_kernels_were_never_run_on():
    (state,) = gpu.parse_query("0, NVIDIA B200, GPU-a, 570.1, 10.0, 183359, 4, Disabled\n")
    finding = gpu.judge_gpu(state)
    assert level(finding) == "warning" and "were never run on one" in finding.text


def test_no_driver_and_a_broken_one():
    missing = Output(None, "", "nvidia-smi: No such file or directory")
    assert [level(f) for f in gpu.judge_driver([], missing)] == ["ok"]
    broken = Output(9, "", "NVIDIA-SMI has failed because it couldn't communicate")
    (finding,) = gpu.judge_driver([], broken)
    assert level(finding) == "error"
    assert "couldn't communicate" in finding.text


TOPOLOGY = """\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tNV18\tPIX\t0-51\t0
GPU1\tNV18\t X \t{}\tNODE\t0-51\t0
GPU2\tNV18\t{}\t X \tSYS\t52-103\t1
NIC0\tPIX\tNODE\tSYS\t X

Legend:
  X    = Self
"""


def test_links():
    links = gpu.parse_links(TOPOLOGY.format("NV18", "NV18"))
    assert len(links) == 6
    (finding,) = gpu.judge_links(links)
    assert (level(finding), finding.text) == ("ok", "between all GPUs (NV18)")
    (finding,) = gpu.judge_links(gpu.parse_links(TOPOLOGY.format("SYS", "SYS")))
    assert level(finding) == "warning"
    assert "1-2 (SYS)" in finding.text
    assert gpu.judge_links({}) == []


FULL = [[True] * 4 for _ in range(4)]
ISLANDS = [[True if i // 2 == j // 2 else None for j in range(4)] for i in range(4)]
ONE_WAY = [[True, True], [None, True]]
LOST = [[True, False], [True, True]]


@pytest.mark.parametrize(
    ("reached", "expected", "words"),
    [
        (FULL, "ok", "4 GPUs"),
        (ISLANDS, "warning", "0,1 | 2,3"),
        (ONE_WAY, "error", "GPU 0 to 1"),
        (LOST, "error", "GPU 0 to 1 do not arrive"),
    ],
)
def test_peer_matrix(reached, expected, words):
    finding = peers.judge_answer(Output(0, json.dumps({"reached": reached}), ""))
    assert level(finding) == expected
    assert words in finding.text


@pytest.mark.parametrize(
    "answer", [Output(1, '{"error": "cuInit failed"}', ""), Output(-11, "", "Segmentation fault")]
)
def test_peers_that_cannot_be_tested(answer):
    assert level(peers.judge_answer(answer)) == "warning"


@pytest.mark.parametrize(
    ("answer", "expected", "words"),
    [
        (Output(0, '{"gpus": 4}', ""), "ok", "4 GPUs share memory"),
        (Output(1, '{"error": "cuMemCreate failed."}', ""), "warning", "cuMemCreate failed"),
        (Output(-11, "", "Segmentation fault"), "warning", "Segmentation fault"),
    ],
)
def test_heap(answer, expected, words):
    finding = heap.judge_answer(answer)
    assert level(finding) == expected and words in finding.text
    assert expected == "ok" or "STRETTO_HEAP=0" in finding.way_out


def test_heap_without_gpus_is_not_asked_for():
    assert heap.check_heap(1) == []


class FakeDriver:
    """Three GPUs: 0 and 1 reach each other, 2 is reached by none, 1's stores to 0 get lost."""

    def __init__(self):
        self.memory = [0, 0, 0]

    def count(self):
        return 3

    def open(self, ordinal):
        return ordinal

    def can_access(self, one, other):
        return 2 not in (one, other)

    def write(self, writer, owner, nonce):
        if (writer, owner) != (1, 0):
            self.memory[owner] = nonce

    def read(self, owner):
        return self.memory[owner]


def test_probe_writes_and_reads_back():
    told = probe_module.probe(FakeDriver())
    assert told == {"reached": [[True, True, None], [False, True, None], [None, None, True]]}


def test_driver_calls_are_checked():
    class Library:
        def cuInit(self, _):
            return 100

    with pytest.raises(probe_module.CudaError, match="cuInit failed with CUDA error 100"):
        probe_module.Driver(Library())


def test_probe_without_a_driver_says_so():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        done = ask([sys.executable, "-m", "stretto.launch.doctor.peer_probe"], 30)
        assert done.status == 1
        assert "libcuda" in json.loads(done.stdout)["error"]
    else:
        pytest.skip("this machine has a driver")


def _ptxas() -> str | None:
    wheels = Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cu*/bin/ptxas")
    return next((str(path) for path in wheels), shutil.which("ptxas"))


@pytest.mark.skipif(_ptxas() is None, reason="needs ptxas (the aot dependency group)")
def test_probe_kernel_compiles_for_hopper(tmp_path):
    source = tmp_path / "nonce.ptx"
    source.write_bytes(probe_module._PTX)
    command = [str(_ptxas()), "-arch=sm_90a", str(source), "-o", str(tmp_path / "nonce.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert b"write_nonce" in (tmp_path / "nonce.cubin").read_bytes()


# --- JAX and NCCL. --------------------------------------------------------------------------------


def devices(platform: str, count: int) -> Output:
    told = {"platform": platform, "kinds": ["x"] * count, "adds": True}
    return Output(0, f"noise\n{json.dumps(told)}\n", "")


@pytest.mark.parametrize(
    ("answer", "num_gpus", "expected"),
    [
        (devices("cpu", 1), 0, "ok"),
        (devices("gpu", 4), 4, "ok"),
        (devices("cpu", 1), 4, "error"),
        (devices("gpu", 3), 4, "warning"),
        (Output(-6, "", "F0000 Unknown flag in XLA_FLAGS"), 4, "error"),
        (Output(None, "", "python gave no answer within 120 s"), 0, "error"),
    ],
)
def test_jax_devices(answer, num_gpus, expected):
    assert level(jax_devices.judge_jax_devices(answer, num_gpus)) == expected


@pytest.mark.parametrize(
    ("code", "version"), [(22903, (2, 29, 3)), (22809, (2, 28, 9)), (2708, (2, 7, 8))]
)
def test_nccl_version_code(code, version):
    assert nccl.decode(code) == version


@pytest.mark.parametrize(
    ("version", "expected"),
    [((2, 29, 0), "ok"), ((2, 30, 1), "ok"), ((2, 28, 9), "warning"), (None, "warning")],
)
def test_nccl(version, expected):
    assert level(nccl.judge_nccl(version, "/x/libnccl.so.2")) == expected


def test_nccl_is_looked_for_in_the_loaders_order(tmp_path):
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"not a library")
    assert nccl.candidates({"LD_LIBRARY_PATH": f":/none:{tmp_path}"})[0] == str(library)
    preloaded = {"LD_PRELOAD": "/x/libfoo.so:/y/libnccl.so.2", "LD_LIBRARY_PATH": str(tmp_path)}
    assert nccl.candidates(preloaded)[:2] == ["/y/libnccl.so.2", str(library)]
    assert nccl.find_nccl({"LD_LIBRARY_PATH": str(tmp_path)})[1] != str(library)


@pytest.fixture
def machine_of_two_gpus(tmp_path, monkeypatch) -> str:
    """Two GPUs and NCCL 2.28, or by `LD_PRELOAD` the version in the file's name; gives a script."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\nfor i in 0 1; do echo "GPU $i: H100 (UUID: GPU-$i)"; done\n')
    smi.chmod(0o755)
    (tmp_path / "script.py").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def find_nccl(environ):
        path = environ.get("LD_PRELOAD", "/x/libnccl.so.2.28.9")
        return tuple(map(int, path.partition(".so.")[2].split("."))), path

    monkeypatch.setattr(nccl, "find_nccl", find_nccl)
    return str(tmp_path / "script.py")


def test_run_refuses_one_process_per_gpu_with_an_old_nccl(machine_of_two_gpus, capfd):
    script = machine_of_two_gpus
    assert cli.main(["run", "--processes-per", "gpu", script]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "NCCL 2.28.9" in line
    assert "nvidia-nccl-cu13>=2.29" in line
    preload = ["--env", "LD_PRELOAD=/y/libnccl.so.2.29.9"]
    assert cli.main(["run", "--dry-run", "--processes-per", "gpu", *preload, script]) == 0
    assert "LD_PRELOAD='/y/libnccl.so.2.29.9'" in capfd.readouterr().out
    assert cli.main(["run", "--dry-run", script]) == 0
    shown = capfd.readouterr().out
    assert "process 0 on localhost: GPU 0, 1" in shown
    assert "JAX_PLATFORMS='cuda,cpu'" in shown


def test_run_shares_gpus_between_processes(machine_of_two_gpus, capfd):
    options = ["--dry-run", "-n", "3", "--devices-per-gpu", "2"]
    preload = ["--env", "LD_PRELOAD=/y/libnccl.so.2.29.9"]
    assert cli.main(["run", *options, *preload, machine_of_two_gpus]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "--devices-per-gpu cannot work here: it needs NCCL 2.30" in line
    assert "2.29.9 (/y/libnccl.so.2.29.9)" in line
    preload = ["--env", "LD_PRELOAD=/y/libnccl.so.2.30.3"]
    assert cli.main(["run", *options, *preload, machine_of_two_gpus]) == 0
    shown = capfd.readouterr()
    for process, number in enumerate([0, 0, 1]):
        assert f"process {process} on localhost: GPU {number}\n" in shown.out
    assert "NCCL_MULTI_RANK_GPU_ENABLE='1'" in shown.out
    assert "XLA_PYTHON_CLIENT_PREALLOCATE='false'" in shown.out
    # A choice of the user's own comes first.
    own = ["--env", "XLA_PYTHON_CLIENT_PREALLOCATE=true"]
    assert cli.main(["run", *options, *preload, *own, machine_of_two_gpus]) == 0
    assert "XLA_PYTHON_CLIENT_PREALLOCATE='true'" in capfd.readouterr().out
    named = ["--dry-run", "--hosts", "localhost:5", "--devices-per-gpu", "2"]
    assert cli.main(["run", *named, *preload, machine_of_two_gpus]) == 2
    assert "offers 4 devices, 2 on each GPU, and not 5" in capfd.readouterr().err
