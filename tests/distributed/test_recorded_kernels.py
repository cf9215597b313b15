"""Kernels stay out of command buffers, or say why they cannot."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stretto.distributed import xla_flags
from stretto.distributed.recording import recorded
from stretto.distributed.tools import aot
from stretto.distributed.xla_flags import NO_RECORDED_KERNELS

READ_BACK = """
from stretto.distributed.private_jax import options
print(options.why_kernels_are_recorded())
"""
LOWER = """
import jax.numpy as jnp, stretto as st
from jax.sharding import NamedSharding, PartitionSpec as P
from stretto.distributed.tools import aot
from stretto.distributed.errors import BackendUnavailableError
mesh = aot.mesh_of_gpus((4,), ("x",))
struct = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
gather = lambda backend: jax.jit(jax.shard_map(
    lambda x: st.all_gather(x, "x", backend=backend), mesh=mesh, in_specs=P("x"), out_specs=P(None),
    check_vma=False))
print("auto", "mosaic" in gather("auto").lower(struct).as_text())
try:
    gather("pallas").lower(struct)
except BackendUnavailableError as error:
    print(error)
"""

ACCEPTED = """
import jax, jax.numpy as jnp, stretto
from jax.sharding import NamedSharding, PartitionSpec as P
from stretto.distributed import recording
from stretto.distributed.tools import aot
sharding = NamedSharding(aot.mesh_of_gpus((1,), ("x",)), P())
lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding))
lowered.compile(compiler_options=recording.OPTIONS)
try:
    lowered.compile(compiler_options=dict(recording.OPTIONS, xla_gpu_graph_min_size=1))
except Exception as error:
    print(error)
"""


def run(code: str, flags: str | None = None) -> str:
    environ = dict(os.environ, JAX_PLATFORMS="cpu")
    environ.pop("XLA_FLAGS", None)
    if flags is not None:
        environ["XLA_FLAGS"] = flags
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "flags",
    [
        None,
        "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL",
        "--xla_gpu_enable_command_buffer=+COLLECTIVES",
        "--xla_gpu_enable_command_buffer=",
    ],
)
def test_xla_takes_the_flag_whatever_others_there_are(flags) -> None:
    assert run(READ_BACK, flags) == "None\n"


def test_it_is_noticed_that_xla_had_read_its_flags_before() -> None:
    told = run("import jax; jax.devices()" + READ_BACK)
    assert NO_RECORDED_KERNELS in told
    assert "import stretto before" in told.lower()


@pytest.mark.skipif(not aot.is_available(), reason="needs the compiler: `uv sync --group aot`")
def test_a_kernel_that_would_be_recorded_is_refused_and_auto_takes_xla() -> None:
    told = run("import jax; jax.devices()" + LOWER)
    assert told.startswith("auto False\n")
    assert "cannot serve this call: XLA would record kernels" in told


@pytest.mark.skipif(not aot.is_available(), reason="needs the compiler: `uv sync --group aot`")
def test_xla_knows_the_options_of_recorded_programs() -> None:
    assert "No such compile option: 'xla_gpu_graph_min_size'" in run(ACCEPTED)


BETWEEN_PROCESSES = """
import warnings
import jax, jax.numpy as jnp, stretto as st
from jax.sharding import NamedSharding, PartitionSpec as P
from stretto.distributed.tools import aot
struct = lambda mesh: jax.ShapeDtypeStruct((256, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
gather = lambda x: st.all_gather(x, "x", backend="pallas")
for processes in (1, 2):
    mesh = aot.mesh_of_gpus((2,), ("x",), processes=processes)
    mapped = jax.shard_map(gather, mesh=mesh, in_specs=P("x"), out_specs=P(None), check_vma=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(mapped).lower(struct(mesh))
    print(processes, *(w.message for w in caught if "joins several processes" in str(w.message)))
"""  # noqa: E501


@pytest.mark.skipif(not aot.is_available(), reason="needs the compiler: `uv sync --group aot`")
def test_a_kernel_between_processes_warns_without_the_flag() -> None:
    one, two = run(BETWEEN_PROCESSES).splitlines()
    assert one == "1"
    assert two.startswith("2 kernel all_gather joins several processes")
    assert "stretto.initialize()" in two
    assert run(BETWEEN_PROCESSES, xla_flags.NO_SLICES_IN_CALLS) == "1\n2\n"


def test_other_flags_are_kept() -> None:
    environ = {"XLA_FLAGS": "--xla_dump_to=here"}
    xla_flags.exclude_kernels_from_command_buffers(environ)
    xla_flags.exclude_kernels_from_command_buffers(environ)
    assert environ["XLA_FLAGS"] == f"--xla_dump_to=here {NO_RECORDED_KERNELS}"


def test_runs_of_four_kernels_are_recorded_unless_the_user_decides() -> None:
    xla_flags.record_runs_of_four(environ := {"XLA_FLAGS": "--xla_dump_to=here"})
    xla_flags.record_runs_of_four(environ)
    assert environ["XLA_FLAGS"] == f"--xla_dump_to=here {xla_flags.LEAST_RECORDED}"
    assert xla_flags.given(environ) == "--xla_dump_to=here"
    own = xla_flags.LEAST_RECORDED.replace("4", "7")
    xla_flags.record_runs_of_four(environ := {"XLA_FLAGS": own})
    assert environ["XLA_FLAGS"] == own
    assert run("import os, stretto; print(os.environ['XLA_FLAGS'])").split() == [
        *xla_flags.ON_IMPORT
    ]


def test_the_flag_for_kernels_between_processes() -> None:
    flag = xla_flags.NO_SLICES_IN_CALLS
    environ = {"XLA_FLAGS": "--xla_dump_to=here"}
    assert not xla_flags.decides_on_slices(environ)
    xla_flags.share_memory_of_kernels(environ)
    assert environ["XLA_FLAGS"] == f"--xla_dump_to=here {flag}"
    assert xla_flags.decides_on_slices(environ)
    assert xla_flags.given(environ) == "--xla_dump_to=here"
    xla_flags.share_memory_of_kernels(environ := {})
    assert environ["XLA_FLAGS"] == flag
    own = flag.replace("false", "true")
    xla_flags.share_memory_of_kernels(environ := {"XLA_FLAGS": own})
    assert environ["XLA_FLAGS"] == own


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="recorded: fun=3 is of type int, no function"):
        recorded(3)  # pyright: ignore[reportArgumentType]
