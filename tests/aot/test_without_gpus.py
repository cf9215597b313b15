"""What compiling for a GPU needs of the machine: set by those who can, and told where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jax.experimental import topologies

from stretto.distributed.tools import aot

SCRIPT = Path(__file__).parents[2] / "examples" / "transformer" / "collectives.py"


needs_compiler = pytest.mark.skipif(
    not aot.is_available(), reason="needs the compiler: `uv sync --group aot`"
)


def run(*command: str) -> subprocess.CompletedProcess:
    """With nothing in the environment that chooses JAX's platform."""
    environ = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, *command],
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "cuDNN" not in done.stderr
    return done


@needs_compiler
@pytest.mark.slow
def test_collectives_of_a_step_on_gpus_that_are_not_there():
    done = run(str(SCRIPT), "--target", "h100", "--backend", "pallas")
    heading, *lines = done.stdout.splitlines()
    assert heading.split()[:3] == ["n", "where", "what"]
    kernels = [line.split("kernel ")[1].split()[0] for line in lines if "kernel " in line]
    assert set(kernels) == {"all_gather_matmul", "matmul_reduce_scatter"}


NOT_COMPILED = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import collectives

class Step:
    def as_text(self):
        return ""

def compiled_step(mesh, *_):
    print(mesh.devices.flat[0].device_kind)
    return Step()

collectives.compiled_step = compiled_step
collectives.main(sys.argv[1:])
"""


@needs_compiler
def test_gpus_that_are_not_there_need_nothing_set():
    """And a table without lines says why."""
    done = run("-c", NOT_COMPILED, str(SCRIPT.parent), "--target", "h100", "--tp", "1")
    assert done.stdout.splitlines() == [
        "NVIDIA H100 80GB HBM3",
        "A step on 1 x 1 (dp x tp) devices sends nothing; pass more of them.",
    ]


@pytest.mark.parametrize(
    ("installed", "way_out"),
    [(False, r"needs packages .* `uv sync --group aot`"), (True, r"set JAX_PLATFORMS=cpu before")],
)
def test_a_compiler_that_is_not_there_is_told(monkeypatch, installed, way_out):
    def none(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", none)
    monkeypatch.setattr(aot, "is_available", lambda: installed)
    with pytest.raises(RuntimeError, match=way_out):
        aot.mesh_of_gpus((4,), ("x",))


def test_unknown_gpus_are_refused():
    with pytest.raises(ValueError, match=r"target='h1' must be one of b200, h100\."):
        aot.mesh_of_gpus((4,), ("x",), target="h1")
