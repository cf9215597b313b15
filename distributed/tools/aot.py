"""Compiling kernels for GPUs on a machine that has none, and reading what the compiler made.

Needs the packages of the `aot` dependency group and `JAX_PLATFORMS=cpu` (see CONTRIBUTING.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.experimental import topologies

from stretto.distributed import settings
from stretto.distributed.by_name import by_name
from stretto.distributed.tools import ptx
from stretto.distributed.tools.ptx import CompiledKernel

TARGETS = pathlib.Path(__file__).parents[2] / "configs" / "targets"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A program compiled ahead of time: its optimised HLO, and its Mosaic GPU kernels."""

    hlo: str
    kernels: tuple[CompiledKernel, ...]


def is_available() -> bool:
    """Whether the packages that compile for a GPU are installed."""
    return all(
        importlib.util.find_spec(name) is not None for name in ("jax_plugins", "jax_cuda13_plugin")
    )


@by_name
def mesh_of_gpus(
    shape: Sequence[int], axis_names: Sequence[str], *, target: str = "h100", processes: int = 1
) -> jax.sharding.Mesh:
    """A mesh of GPUs that are not there, of one host.

    Args:
      shape: the mesh's shape.
      axis_names: one for each dimension.
      target: a file of `configs/targets/`, without its ending.
      processes: how many processes the GPUs are divided among.

    Raises:
      ValueError: an unknown target.
      RuntimeError: the compiler is not installed, or JAX has not loaded it.
    """
    known = sorted(path.stem for path in TARGETS.glob("*.txtpb"))
    if target not in known:
        raise ValueError(f"target={target!r} must be one of {', '.join(known)}.")
    size = int(np.prod(shape))
    try:
        description = topologies.get_topology_desc(
            platform="cuda",
            target_config=(TARGETS / f"{target}.txtpb").read_text(),
            topology=f"1x{processes}x{size // processes}",
        )
    except NotImplementedError as error:
        raise RuntimeError(_why_not(target)) from error
    return jax.sharding.Mesh(np.array(description.devices).reshape(shape), tuple(axis_names))


def _why_not(target: str) -> str:
    if not is_available():
        return (
            f"compiling for {target} needs packages that are not installed: `uv sync --group aot`"
            " installs them, `uv run --group aot ...` for one command."
        )
    return (
        f"compiling for {target} needs the plugin for GPUs, which JAX has not loaded: without GPUs"
        " set JAX_PLATFORMS=cpu before JAX is first used; otherwise see what JAX wrote above."
    )


def compile_program(fun: Callable, *operands: jax.ShapeDtypeStruct) -> CompiledProgram:
    """Compiles `jax.jit(fun)` for the devices that the operands' shardings name.

    Not to be called from two threads at once: the compiler's dumps are asked for through the
    environment of the process. Every exception has the compiler's output in its notes.
    """
    with tempfile.TemporaryDirectory() as folder, settings.dumps_to(folder), _quietly():
        hlo = jax.jit(fun).lower(*operands).compile().as_text() or ""
        return CompiledProgram(hlo=hlo, kernels=tuple(ptx.read_kernels(pathlib.Path(folder))))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Hides the compiler's output on stderr, and adds it to an error.

    With dumps enabled it warns that it has no disassembler, which is not needed.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        except Exception as error:
            file.seek(0)
            error.add_note(file.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
