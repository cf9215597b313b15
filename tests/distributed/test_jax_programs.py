"""What is told of programs: the same on every process that must run the same."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import lax
from jax._src import compiler
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stretto.distributed.private_jax import programs

MESH = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Auto,))


def described(body, rows=4, dtype=np.float32):
    program = jax.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    lowered = jax.jit(program).lower(jax.ShapeDtypeStruct((rows, 8), dtype))
    return programs.describe(lowered.compiler_ir(), (0, 1))


def test_what_a_process_puts_in_of_its_own_counts_for_nothing():
    one, other = (described(lambda x, c=c: lax.psum(x * c, "x")) for c in (1.5, 2.5))
    assert one == other
    assert one.text == "jit__lambda (4x8xf32) -> 4x8xf32"


@pytest.mark.parametrize(
    "changes",
    [
        dict(body=lambda x: lax.pmax(lax.psum(x, "x"), "x")),
        dict(body=lambda x: lax.ppermute(x, "x", [(0, 1), (1, 0)])),
        dict(body=lambda x: x),
        dict(rows=6),
        dict(dtype=np.int32),
    ],
)
def test_what_must_be_the_same(changes):
    first = dict(body=lambda x: lax.psum(x, "x"))
    assert described(**first).digest != described(**(first | changes)).digest


def test_many_operands_are_cut():
    lowered = jax.jit(lambda *xs: sum(xs)).lower(*[np.zeros((4, 5))] * 60)
    text = programs.describe(lowered.compiler_ir(), (0, 1)).text
    assert len(text) < 200 and text.endswith(" ...")


def test_who_is_told(monkeypatch):
    """Of programs of several processes, compiled by the main thread."""
    compiled, told = [], []
    monkeypatch.setattr(compiler, "compile_or_get_cached", lambda *args: compiled.append(args))
    assert programs.watch(told.append)
    module = jax.jit(lambda x: x).lower(1.0).compiler_ir()

    def compile_for(*processes):
        devices = np.array([SimpleNamespace(process_index=p) for p in processes])
        compiler.compile_or_get_cached(None, module, devices)

    compile_for(0, 0)
    compile_for(1, 0, 1)
    thread = threading.Thread(target=compile_for, args=(0, 1))
    thread.start()
    thread.join()
    assert [program.processes for program in told] == [(0, 1)]
    assert len(compiled) == 3


def test_a_jax_that_compiles_elsewhere(monkeypatch):
    monkeypatch.delattr(compiler, "compile_or_get_cached")
    assert not programs.watch(print)
