"""`stretto compile` without its compiler: what it prints, refuses and returns.

What it compiles is tested in `tests/aot/test_compile_script.py`.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from stretto.distributed import compiling
from stretto.distributed.sites import Site
from stretto.distributed.tools import ahead, aot
from stretto.distributed.tools.ptx import CompiledKernel, source_line
from stretto.launch import cli

GPUS = compiling.Target("h100", "NVIDIA H100 80GB HBM3", 132)
PTX = """
    .loc 1 13 0
    wgmma.mma_async.sync.aligned ...
    .loc 2 170 11
    red.release.sys.global.add.u32 [%rd1], 1;
    ld.acquire.gpu.global.u32 %r1, [%rd2];
    ld.global.b64 %rd3, [%rd4];
    st.global.b32 [%rd5], %r2;
.file 1 "/tmp/kernel.py"
.file 2 "/tmp/other.py"
"""
SERIALISED = (
    "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    " due to the presence of a function call in line 6 in function 'mine'"
)


def compiled(**changes) -> CompiledKernel:
    fields: dict[str, Any] = dict(
        name="mine_0", ptx=PTX, registers=168, stack_bytes=0, spill_bytes=0, warnings=(),
        shared_bytes=2048,
    )  # fmt: skip
    return CompiledKernel(**(fields | changes))


def outcome(error: str = "", **changes) -> ahead.Outcome:
    return ahead.Outcome(
        name="mine",
        operands=("float32[8,128]",),
        site=Site("/tmp/kernel.py", 12, "body"),
        programs=("jit_step", "jit_loss"),
        compiled=None if error else compiled(**changes),
        error=error,
    )


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """The command on a script, with these outcomes in place of the compiler's."""

    def run(*outcomes, text="", options=()):
        script = tmp_path / "script.py"
        script.write_text(text)
        left = iter(outcomes)
        found = dict.fromkeys(range(len(outcomes)))
        monkeypatch.setattr(ahead, "gpus", lambda name, devices: GPUS)
        monkeypatch.setattr(ahead, "finding", lambda gpus: contextlib.nullcontext(found))
        monkeypatch.setattr(ahead, "compile_kernel", lambda kernel, gpus: next(left))
        argv = ["compile", "-n", str(jax.device_count()), *options, str(script)]
        return cli.main(argv), *capsys.readouterr()

    return run


def test_a_line_for_each_kernel(run):
    status, out, err = run(outcome(), outcome(shared_bytes=8))
    assert (status, err) == (0, "")
    heading, columns, first, second = out.splitlines()
    assert heading == "compiled for NVIDIA H100 80GB HBM3:"
    assert columns.split("  ")[0] == "kernel" and "tensor cores" in columns
    cells = [cell.strip() for cell in first.split("  ") if cell.strip()]
    accesses = "1 sys, 1 gpu, 1 plain"
    assert cells == [
        *("mine", "float32[8,128]", "168", "0 B", "wgmma", "2.0 KB", accesses),
        "jit_step, jit_loss",
    ]
    assert " 8 B " in second


def test_spills_and_refusals_fail_the_command(run):
    status, out, _ = run(outcome(), outcome(spill_bytes=24))
    assert status == 1
    assert "kernel mine spills: 24 bytes" in out and "kernel.py:12 (body)" in out
    status, out, _ = run(outcome(error="too wide\n  at kernel.py:7 (body): x"))
    assert status == 1
    assert "does not compile: too wide\n  at kernel.py:7" in out


def test_serialised_tensor_cores_are_told_with_their_line(run):
    status, out, _ = run(outcome(warnings=(SERIALISED,)))
    assert status == 0
    assert "  serialised  " in out
    assert out.endswith(f"kernel mine: {SERIALISED}\n  at /tmp/other.py:170\n")


def test_json_is_alone_on_stdout(run):
    status, out, err = run(
        outcome(spill_bytes=4), outcome(error="no"), text="print(1)", options=("--json",)
    )
    assert (status, err) == (1, "1\n")
    read = json.loads(out)
    assert read["target"] == GPUS.kind and read["stopped"] is None
    good, bad = read["kernels"]
    assert good["spill_bytes"] == 4 and good["accesses"] == {"sys": 1, "gpu": 1, "plain": 1}
    assert (good["file"], good["line"], good["error"]) == ("/tmp/kernel.py", 12, None)
    assert bad["error"] == "no" and "registers" not in bad


def test_a_script_without_a_kernel_does_not_pass(run):
    status, out, err = run(text="print('ran')")
    assert status == 3
    assert out == "ran\ncompiled for NVIDIA H100 80GB HBM3: nothing\n"
    assert err.startswith("stretto compile: the script called no kernel; print(stretto.explain(")


@pytest.mark.parametrize(
    ("text", "outcomes", "expected"),
    [
        ("x = 1\nassert not x", 1, 0),  # Results are zeros: what checks them cannot hold.
        ("x = 1\nassert not x", 0, 1),
        ("x = 1\n1 / 0", 1, 1),
        ("import sys; sys.exit(7)", 1, 7),
    ],
)
def test_scripts_that_stop(run, text, outcomes, expected):
    status, _, err = run(*[outcome()] * outcomes, text=text)
    assert status == expected
    if outcomes and "sys" not in text:
        kind = "AssertionError" if "assert" in text else "ZeroDivisionError"
        last = err.splitlines()[-1]
        assert last.startswith(f"stretto compile: the script stopped at script.py:2: {kind}. ")
    assert ("Traceback" in err) == (expected == 1)


def test_what_cannot_work_is_refused(tmp_path, monkeypatch, capsys):
    def told(*options):
        status = cli.main(["compile", "-n", str(jax.device_count()), *options])
        assert status == 2
        return capsys.readouterr().err

    script = tmp_path / "script.py"
    assert told("-n", "0", str(script)) == "stretto compile: -n 0 must be at least 1\n"
    assert "script.py does not exist; give the path" in told(str(script))
    script.write_text("")
    assert "target='h1' must be one of b200, h100." in told("--target", "h1", str(script))

    def none(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", none)
    monkeypatch.setattr(aot, "is_available", lambda: False)
    assert "`uv sync --group aot` installs them" in told(str(script))


def test_the_source_of_a_line():
    assert source_line(PTX, 3) == "/tmp/kernel.py:13"
    assert source_line(PTX, 6) == "/tmp/other.py:170"
    assert source_line(PTX, 1) == ""


def test_what_the_compiler_says_first_and_where():
    text = """
loc("noise") : warning: nothing
loc(fused<a>["get:"("get"("/tmp/kernel.py":7:41))]): error: LLVM Translation failed
loc("barrier_arrive:"("barrier_arrive"("/tmp/kernel.py":10:4))): error: not supported on sm_90a
"""
    assert ahead.diagnostic(text) == ("LLVM Translation failed", Site("/tmp/kernel.py", 7, "get"))
    assert ahead.diagnostic("error: no place") == ("no place", None)
    assert ahead.diagnostic("nvdisasm invocation failed: INTERNAL") is None
