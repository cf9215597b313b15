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
    ("name", "axis", "every"),
    [
        ("all_gather_matmul", "k", 5),
        pytest.param("all_gather_matmul", "m", 1, marks=slow),
        pytest.param("all_gather_matmul", "k", 1, marks=slow),
        pytest.param("all_gather_matmul", "n", 1, marks=slow),
        pytest.param("matmul_reduce_scatter", None, 1, marks=slow),
        pytest.param("matmul_all_reduce", None, 1, marks=slow),
    ],
)
def test_every_mix(name, axis, every):
    mixes = MIXES[::every]
    options = {} if axis is None else dict(gather_axis=axis)
    operands, right = [], []
    for lhs, rhs, transposed in mixes:
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
        for mix, given, (first, second) in zip(mixes, operands, types, strict=False):
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
    for mix, out, want in zip(mixes, jax.jit(program)(operands), right, strict=True):
        np.testing.assert_array_equal(out, want, err_msg=str(mix))


# --- Groups of rows -------------------------------------------------------------------------------

SIZES, ROWS = np.array([12, 0, 9], np.int32), 24


def of_groups(kind):
    """rhs of each group, `[g, n, k]`, its scales, and both; "each" is one scale for each group."""
    rhs = cases.whole_numbers(2, len(SIZES), N, K)
    shape = dict(tensor=(), each=(1, 1), row=(N, 1), block=(blocks(N), blocks(K))).get(kind)
    if shape is None:
        return rhs, None, rhs
    scale = powers_of_two(4, *(shape and (len(SIZES), *shape)))
    wide = scale
    if kind == "block":
        wide = np.repeat(np.repeat(scale, 128, 1)[:, :N], 128, 2)[:, :, :K]
    wide = rhs * wide
    if kind == "row":
        scale[1] = np.nan  # Of the group without rows.
    return rhs, scale, wide


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=slow)])
def test_every_mix_of_groups(every):
    """Rows of no group, and the scales of a group without rows, are NaN."""
    kinds = itertools.product(KINDS, (None, "tensor", "each", "row", "block"), (True, False))
    left_out = (None, None), ("block", "row")
    mixes = [mix for mix in kinds if mix[:2] not in left_out][::every]
    operands, right = [], []
    for lhs, rhs, transposed in mixes:
        x, of_x, wide_x = drawn(0, lhs, ROWS, K, 1)
        y, of_y, wide_y = of_groups(rhs)
        want = np.zeros((ROWS, N), np.float32)
        want[:12], want[12:21] = wide_x[0][:12] @ wide_y[0].T, wide_x[0][12:21] @ wide_y[2].T
        right.append(want)
        x = x[0].copy()
        x[SIZES.sum() :] = np.nan
        if not transposed:
            y = y.swapaxes(1, 2)
            of_y = of_y if of_y is None or of_y.ndim == 0 else of_y.swapaxes(1, 2)
        given = x, y, None if of_x is None else of_x[0], of_y
        operands.append(jax.tree.map(lambda a: jnp.asarray(a, F32), given))

    @jax.jit
    def call(operands):
        types = itertools.cycle(itertools.product((E4M3, E5M2), repeat=2))
        return [
            st.grouped_matmul(
                x.astype(first),
                y.astype(second),
                jnp.asarray(SIZES),
                rhs_transposed=mix[2],
                lhs_scale=of_x,
                rhs_scale=of_y,
                out_dtype=F32,
                backend="xla",
            )
            for mix, (x, y, of_x, of_y), (first, second) in zip(
                mixes, operands, types, strict=False
            )
        ]

    for mix, out, want in zip(mixes, call(operands), right, strict=True):
        np.testing.assert_array_equal(out, want, err_msg=str(mix))
