"""Every mix of scales that two operands may have, by XLA, beside the exact product.

Each device has operands and scales of its own, k is no multiple of a block, and types alternate.
All mixes of an operation are one program.
"""

from __future__ import annotations

import itertools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import F32
from jax.sharding import PartitionSpec as P
from scaled_cases import E4M3, E5M2, blocks, powers_of_two

import stretto as st

DEVICES, M, K, N = 2, 16, 200, 136
KINDS = (None, "tensor", "row", "block")
MIXES = [
    (lhs, rhs, transposed)
    for lhs, rhs, transposed in itertools.product(KINDS, KINDS, (True, False))
    if (lhs, rhs) not in ((None, None), ("block", "row"))
]
slow = pytest.mark.slow


def drawn(seed, kind, rows, k, step):
    """An operand `[rows, k]` of each device, its scales (of blocks `step` rows high), and both."""
    values, scales, products = [], [], []
    for i in range(seed, seed + DEVICES):
        values.append(cases.whole_numbers(i, rows, k))
        shape = {"row": (rows, 1), "block": (-(-rows // step), blocks(k))}.get(kind or "", ())
        scales.append(powers_of_two(i + 10, *shape) if kind else np.float32(1))
        wide = scales[-1]
        if kind == "block":
            wide = np.repeat(np.repeat(wide, step, 0)[:rows], 128, 1)[:, :k]
        products.append(values[-1] * wide)
    return np.stack(values), np.stack(scales) if kind else None, products


def wanted(name, axis, x, y):
    """What each device has, of the exact operands of all."""
    if name == "all_gather_matmul":
        if axis == "n":
            return np.stack([a @ np.concatenate(y).T for a in x])
        whole = np.concatenate(x, 1 if axis == "k" else 0)
        return np.stack([whole @ b.T for b in y])
    total = sum(a @ b.T for a, b in zip(x, y, strict=True))
    return np.split(total, DEVICES) if name == "matmul_reduce_scatter" else [total] * DEVICES


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        pytest.param("all_gather_matmul", "m", marks=slow),
        ("all_gather_matmul", "k"),
        pytest.param("all_gather_matmul", "n", marks=slow),
        pytest.param("matmul_reduce_scatter", None, marks=slow),
        pytest.param("matmul_all_reduce", None, marks=slow),
    ],
)
def test_every_mix(name, axis):
    options = {} if axis is None else dict(gather_axis=axis)
    operands, right = [], []
    for lhs, rhs, transposed in MIXES:
        x, of_x, wide_x = drawn(0, lhs, M, K, 1)
        y, of_y, wide_y = drawn(50, rhs, N, DEVICES * K if axis == "k" else K, 128)
        if not transposed:
            y, of_y = (
                y.swapaxes(1, 2),
                of_y if of_y is None or of_y.ndim == 1 else of_y.swapaxes(1, 2),
            )
        operands.append(jax.tree.map(lambda a: jnp.asarray(a, F32), (x, y, of_x, of_y)))
        right.append(wanted(name, axis, wide_x, wide_y))

    def call(operands):
        outs = []
        types = itertools.cycle(itertools.product((E4M3, E5M2), repeat=2))
        for mix, given, (first, second) in zip(MIXES, operands, types, strict=False):
            x, y, of_x, of_y = (None if a is None else a[0] for a in given)
            out = getattr(st, name)(
                x.astype(first),
                y.astype(second),
                "x",
                rhs_transposed=mix[2],
                lhs_scale=of_x,
                rhs_scale=of_y,
                out_dtype=F32,
                backend="xla",
                **options,
            )
            outs.append(out[None])
        return outs

    along = P("x")
    program = jax.shard_map(
        call, mesh=cases.mesh_of(DEVICES), in_specs=along, out_specs=along, check_vma=False
    )
    for mix, out, want in zip(MIXES, jax.jit(program)(operands), right, strict=True):
        np.testing.assert_array_equal(out, want, err_msg=str(mix))
