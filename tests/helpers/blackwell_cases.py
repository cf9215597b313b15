"""Kernels with the main loop of Blackwell, simulated: what the tests of it share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import BF16, F32, whole_numbers
from jax.experimental.pallas import mosaic_gpu as plgpu

import stretto as st
from stretto.kernels.engine.blackwell.matmul import Matmul
from stretto.kernels.engine.blackwell.tile_config import TileConfig
from stretto.kernels.fused import grouped_matmul
from stretto.kernels.fused.local_matmul import local_matmul
from stretto.kernels.operations import OPERATIONS as RECORDS

SMALL = TileConfig(tile_n=64, num_stages=2, store_buffers=1)
PAIR = TileConfig(blocks=2, tile_m=256, tile_n=128, num_stages=2, store_buffers=1)


def config_of(name: str, tiles: TileConfig) -> Any:
    kernel = RECORDS[name].kernels[0]
    return dataclasses.replace(kernel.Config(), tiles=tiles)


def simulate(name, devices, *, seed=0, tiles=None, sizes=(65, 72, 136), **settings):
    """Runs an operation; returns whether its numbers are right, and the report."""
    settings = dict(seed=seed, core_count=3, check_hardware=seed == 0) | settings
    config = None if tiles is None else config_of(name, tiles)
    lhs, rhs = cases.operands(*cases.whole(name, devices, *sizes), seed=seed)
    program = jax.jit(cases.mapped(name, cases.mesh_of(devices), out_dtype=F32, config=config))
    with st.simulate(target="b200", on_finding="record", **settings) as report:
        out = np.asarray(program(jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16)))
    return np.array_equal(out, lhs @ rhs), report


def on_one(seed: int, m: int, k: int, n: int, tiles: TileConfig, **settings: Any):
    lhs, rhs = whole_numbers(seed, m, k), whole_numbers(seed + 1, k, n)
    settings = dict(seed=seed, core_count=2, target="b200") | settings
    with st.simulate(on_finding="record", **settings) as report:
        call = functools.partial(local_matmul, out_dtype=F32, config=tiles)
        out = np.asarray(jax.jit(call)(jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16)))
    return np.array_equal(out, lhs @ rhs), report


SIZES = (1, 7, 0, 150, 60)
CONFIG = grouped_matmul.Config(tiles=SMALL)


def groups_of(seed: int, transposed: bool):
    m, k, n = 300, 72, 136
    lhs, rhs = whole_numbers(seed, m, k), whole_numbers(seed + 1, len(SIZES), k, n)
    given = rhs.swapaxes(1, 2) if transposed else rhs
    arrays = [jnp.asarray(lhs, BF16), jnp.asarray(given, BF16), jnp.array(SIZES, jnp.int32)]
    want, first = np.zeros((m, n), np.float32), 0
    for size, matrix in zip(SIZES, rhs, strict=True):
        want[first : first + size] = lhs[first : first + size] @ matrix
        first += size
    return arrays, want


def group_product(seed: int, transposed: bool, config: Any = CONFIG):
    arrays, want = groups_of(seed, transposed)
    call = functools.partial(
        st.grouped_matmul, rhs_transposed=transposed, out_dtype=F32, config=config
    )
    with st.simulate(target="b200", seed=seed, core_count=3, check_hardware=seed == 0) as report:
        out = np.asarray(jax.jit(call)(*arrays))
    assert report.launches == 1
    np.testing.assert_array_equal(out, want)


def group_derivatives(seed: int, transposed: bool, config: Any = CONFIG):
    arrays, _ = groups_of(seed, transposed)

    def loss(x, y, sizes, **options):
        out = st.grouped_matmul(x, y, sizes, rhs_transposed=transposed, out_dtype=F32, **options)
        return jnp.sum(out)

    derivatives = jax.grad(loss, (0, 1))
    fused_ones = jax.jit(functools.partial(derivatives, config=config))
    with st.simulate(target="b200", seed=seed, core_count=3, check_hardware=False) as report:
        fused = fused_ones(*arrays)
        jax.block_until_ready(fused)
    assert report.launches == 2
    wanted = jax.jit(functools.partial(derivatives, backend="xla"))(*arrays)
    for got, want in zip(fused, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def replacing(monkeypatch: pytest.MonkeyPatch, mainloop: type[Any] = Matmul) -> Callable[..., None]:
    """What replaces a function of Pallas wherever it is about the barriers of a name.

    `mainloop` has the barriers. It is called with the function's name and the barriers'; by default
    the call is left out, else `instead(function, barrier, *args, **kwargs)` takes its place.
    """
    named: dict[str, Any] = {}
    roles = mainloop.roles

    def remember(self, block, gates, scratch):
        named.update(scratch)
        return roles(self, block, gates, scratch)

    monkeypatch.setattr(mainloop, "roles", remember)

    def replace(function: str, name: str, instead: Callable = lambda *_, **__: None) -> None:
        original = getattr(plgpu, function)

        def maybe(barrier, *args, **kwargs):
            if getattr(barrier, "ref", barrier) is named.get(name):
                return instead(original, barrier, *args, **kwargs)
            return original(barrier, *args, **kwargs)

        monkeypatch.setattr(plgpu, function, maybe)

    return replace
