"""Kernels over one axis of a mesh of several processes, which share a program with XLA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from folders import HELPERS, PYTHONPATH, QUICKLY_COMPILED

STRETTO_RUN = (sys.executable, "-m", "stretto.launch", "run")

PROGRAM = """
import jax, numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
import stretto as st
from stretto.distributed.errors import BackendUnavailableError

me = st.initialize().process_id
devices = np.array(jax.devices()).reshape(2, -1)
mesh = Mesh(devices, ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
per_node = mesh.shape["gpu"]
both, backend = ("node", "gpu"), "simulator"
x = np.arange(mesh.size, dtype=np.float32)[:, None] * np.ones(128, np.float32)

def body(x):
    rows = st.all_gather(x, "gpu", backend=backend)            # this node's rows
    rows = lax.ppermute(rows, "node", [(0, 1), (1, 0)])        # the other node's
    mine = st.all_to_all(rows, "gpu", split_axis=0, concat_axis=0, backend=backend)
    return mine + 100 * lax.psum(x, both)

program = jax.shard_map(body, mesh=mesh, in_specs=P(both), out_specs=P(both), check_vma=False)
out = jax.jit(program)(x)
for shard in out.addressable_shards:
    node, gpu = divmod(shard.index[0].start // per_node, per_node)
    want = 100 * x.sum(0) + x[(1 - node) * per_node + gpu]
    np.testing.assert_array_equal(np.asarray(shard.data), np.tile(want, (per_node, 1)))
print("right")

for axes in (("gpu", "node"), "node"):
    def refused(x):
        return st.all_gather(x, axes, backend=backend)
    program = jax.shard_map(refused, mesh=mesh, in_specs=P(both), out_specs=P(), check_vma=False)
    try:
        jax.jit(program).lower(x)
    except BackendUnavailableError as error:
        print(error)
"""


JOB = HELPERS / "two_node_job.py"


def run(*command: str) -> str:
    done = subprocess.run(
        [*STRETTO_RUN, *command],
        env=os.environ | PYTHONPATH | QUICKLY_COMPILED,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_process_a_node(tmp_path: Path) -> None:
    """Each process's kernel joins its own devices; a kernel that would need more is refused."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    out = run("-n", "6", "--processes-per", "2", str(script))
    for process in (0, 1):
        assert f"[{process}] right" in out
        lines = [line for line in out.splitlines() if line.startswith(f"[{process}]")]
        for axis in ("('gpu', 'node')", "'node'"):
            pair = "device 0 (process 0, node 0) and device 3 (process 1, node 0)"
            assert any(f"axis {axis} joins {pair}" in line for line in lines), out


@pytest.mark.slow
def test_an_operation_over_both_nodes() -> None:
    """The job that checks GPUs, on a process's CPU devices each: forward, backward, in a loop."""
    out = run("-n", "4", "--processes-per", "2", str(JOB), "simulator", "all_gather_matmul")
    assert '"processes": 2' in out and '"flaws": []' in out
