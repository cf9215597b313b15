"""`stretto compile`: the kernels that a script's jitted calls would run on GPUs, compiled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tutorial

from stretto.distributed.tools import aot

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not aot.is_available(), reason="needs the compiler: `uv sync --group aot`"
)

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, PartitionSpec as P
import stretto as st
from stretto.distributed import copies, kernel
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team

mesh = Mesh(np.array(jax.devices()), ("x",))

def on_mesh(fun, x):
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return np.asarray(jax.jit(mapped)(x))

def launched(body):
    def call(x):
        return kernel.launch(
            body, x, name=body.__name__, team=Team.along("x"), num_blocks=1,
            out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
            semaphore_arrays=dict(sent=SemaphoreArray()),
        )[0]
    return call

def shifts(x_ref, out_ref, *, sent):
    team = Team(("x",), 4)
    copies.remote(out_ref, team, team.neighbour(1))[...] = x_ref[...]
    sent.signal(peer_id=team.neighbour(1))
    sent.wait()

def spills(x_ref, out_ref, *, sent):
    a, b = x_ref[...], out_ref[...]
    out_ref[...] = a * b
    out_ref[...] = jnp.exp(a) + b

def odd(x_ref, out_ref, *, sent):
    out_ref[...] = x_ref[...] + 1

def maxes(x_ref, out_ref):
    out_ref[...] = lax.broadcast(jnp.max(x_ref[...]), (128, 128))

def sized(x_ref, out_ref):
    out_ref[...] = x_ref[...]

"""
PLAIN = """
def plain(body, x, **kw):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.jit(plgpu.kernel(body, out_type=out, kernel_name=body.__name__, **kw))(x)
"""


@pytest.fixture
def compiled(tmp_path):
    """What the command says of a script, or of a file, with nothing set in the environment."""

    def compiled(script: str | Path, *options, args=(), status=0) -> tuple[dict[str, dict], str]:
        if isinstance(script, str):
            (tmp_path / "script.py").write_text(script)
            script = tmp_path / "script.py"
        environ = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
        done = subprocess.run(
            [
                *(sys.executable, "-m", "stretto.launch", "compile", "-n", "4", "--json", *options),
                *(str(script), *args),
            ],
            env=environ, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        kernels = json.loads(done.stdout)["kernels"]
        return {kernel["name"]: kernel for kernel in kernels}, done.stderr

    return compiled


def line_of(text: str) -> int:
    """The line of `SCRIPT` that holds `text`."""
    (number,) = [i for i, line in enumerate(SCRIPT.splitlines(), start=1) if text in line]
    return number


def test_good_kernels_and_others(compiled):
    script = f"""{SCRIPT}
x = jnp.ones((32, 128))
on_mesh(launched(shifts), x)
on_mesh(lambda x: launched(shifts)(x) + 1, x)
on_mesh(launched(spills), jnp.ones((4 * 128, 512)))
on_mesh(launched(odd), jnp.ones((32, 100)))
print("sum", on_mesh(launched(shifts), x).sum())
assert on_mesh(launched(shifts), x).all(), "they are zeros"
on_mesh(launched(sized), x)
"""
    kernels, stderr = compiled(script, status=1)
    assert set(kernels) == {"shifts", "spills", "odd"}
    good = kernels["shifts"]
    assert good["operands"] == ["float32[8,128]"] and not good["spill_bytes"] and not good["error"]
    assert good["accesses"]["sys"] > 2 and good["line"] == line_of("def shifts")
    assert good["programs"] == ["jit_call", "jit__lambda"]
    assert kernels["spills"]["spill_bytes"] > 1000
    assert kernels["spills"]["line"] == line_of("def spills")
    assert f"script.py:{line_of('x_ref[...] + 1')} (odd): " in kernels["odd"]["error"]
    assert "sum 0.0" in stderr and "nvdisasm" not in stderr
    assert re.search(r"the script stopped at script.py:\d+: AssertionError", stderr)


@pytest.mark.slow
def test_kernels_of_jax_alone_and_what_the_passes_of_the_compiler_refuse(compiled):
    script = f"""{SCRIPT}{PLAIN}
count = jax.devices()[0].core_count
plain(sized, jnp.ones((count, 128)))
plain(maxes, jnp.ones((128, 128), jnp.float8_e4m3fn))
with st.simulate():
    assert plain(sized, jnp.ones((8, 128))).all(), "what a script simulates is simulated"
"""
    kernels, _ = compiled(script, status=1)
    assert kernels["sized"]["operands"] == ["float32[132,128]"] and not kernels["sized"]["error"]
    assert f"script.py:{line_of('jnp.max')} (get): " in kernels["maxes"]["error"]
    assert len(kernels) == 2


@pytest.mark.slow
def test_the_example_and_the_readme(compiled):
    example = ROOT / "examples" / "tensor_parallel_mlp.py"
    kernels, _ = compiled(example, args=("--epochs", "1"))
    assert {"all_gather_matmul", "matmul_reduce_scatter"} <= set(kernels)
    assert all(k["tensor_cores"] == "wgmma" for name, k in kernels.items() if "matmul" in name)
    assert not any(kernel["serialised"] for kernel in kernels.values())


@pytest.mark.slow
def test_another_target_takes_what_its_kernels_serve(compiled):
    call = 'on_mesh(launched(shifts), jnp.ones((32, 128)))\nx = jnp.ones((4096, 512), "bfloat16")\n'
    gather = 'on_mesh(lambda x: st.all_gather(x, "x")[:8], x)\n'
    kernels, _ = compiled(SCRIPT + call + gather, "--target", "b200")
    assert set(kernels) == {"shifts"}, "the collectives are Hopper's"
    kernels, _ = compiled(SCRIPT + call + gather)
    assert set(kernels) == {"shifts", "all_gather"}


@pytest.mark.slow
def test_the_tutorial_s_kernel(tmp_path):
    """The page has the table, but for numbers that another compiler may choose otherwise."""
    tutorial.write(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "stretto.launch", "compile", "-n", "4", "check_halo.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wanted, found = (
        re.sub(r"\d+ (sys|gpu)|  \d+  ", "N", text) for text in (tutorial.outputs()[2], done.stdout)
    )
    assert found == wanted
    assert "stopped at check_halo.py:18: AssertionError" in done.stderr
