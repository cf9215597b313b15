"""Sizes that are no multiples of a tile: the right numbers, and no copies.

Operands and results are used as they are where their rows are multiples of 16 bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_epilogues import with_arrays
from fused_cases import BF16, F32
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed import simulator
from stretto.kernels.engine import padding
from stretto.kernels.engine.blackwell import tile_config as blackwell
from stretto.kernels.engine.hopper.applying import Applying
from stretto.kernels.engine.hopper.pieces import Pieces
from stretto.kernels.engine.hopper.tile_config import (
    LARGE,
    NARROW,
    NARROWEST,
    PIECE_ROWS,
    TileConfig,
)
from stretto.kernels.engine.parts import Beside, BesideParts, Tile
from stretto.kernels.fused import all_gather_matmul as gather
from stretto.kernels.fused import all_gather_matmul_k as gather_k
from stretto.kernels.fused.local_matmul import local_matmul
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types

COPIES = re.compile(r"stablehlo\.(pad|slice|concatenate|dynamic_slice|gather)\b")
NARROW_STAGES = TileConfig(tile_n=128, num_stages=2, store_buffers=2)


def test_what_is_whole():
    assert padding.is_whole((16, 128), BF16) and padding.is_whole((3, 24, 192), BF16)
    assert padding.is_whole((16, 64), F32)  # 128 bytes are half as many elements.
    for shape in ((8, 128), (16, 64), (17, 128), (16, 136), (4, 128)):
        assert not padding.is_whole(shape, BF16), shape


@pytest.mark.parametrize(
    ("shape", "on_hopper", "on_blackwell"),
    [
        ((16, 128), (16, 128), (16, 128)),
        ((17, 136), (17, 136), (24, 192)),
        ((1, 8), (1, 8), (16, 128)),
        ((17, 130), (17, 136), (24, 192)),
        ((17, 1028), (17, 1088), (24, 1088)),  # In lines, as it is copied anyway.
    ],
)
def test_what_is_padded(shape, on_hopper, on_blackwell):
    assert padding.shape_of(shape, BF16, LARGE) == on_hopper
    assert padding.shape_of(shape, BF16, blackwell.LARGE) == on_blackwell
    padded = padding.pad(jnp.ones(shape, BF16), LARGE)
    assert padded.shape == on_hopper and padded.sum(dtype=F32) == np.prod(shape)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((17, 130), BF16, True),
        ((2, 17, 1028), BF16, True),
        ((17, 131), BF16, False),
        ((17, 130), F32, False),
    ],
)
def test_copies_to_other_columns_are_of_words(shape, dtype, words):
    x = jax.random.normal(jax.random.key(0), shape, dtype)
    padded = padding.pad(x, LARGE)
    more = padded.shape[-1] - shape[-1]
    np.testing.assert_array_equal(padded, jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]))
    for rows in (shape[-2], 3):
        np.testing.assert_array_equal(padding.cut(padded, rows, shape[-1]), x[..., :rows, :])
    for copy in (
        lambda x: padding.pad(x, LARGE),
        lambda x: padding.cut(x, shape[-2], shape[-1] - 2),
    ):
        assert ("bitcast_convert" in jax.jit(copy).lower(x).as_text()) == words
    same = jax.jit(lambda x: padding.cut(x, 3, shape[-1])).lower(x).as_text()
    assert "bitcast_convert" not in same


def product(m, k, n, *, seed, transposed=False, **options):
    lhs, rhs = cases.operands(m, k, n, seed=seed)
    given = jnp.asarray(rhs.T if transposed else rhs, BF16)
    out = local_matmul(
        jnp.asarray(lhs, BF16),
        given,
        rhs_transposed=transposed,
        interpret=simulator.SimulatorParams(),
        **options,
    )
    np.testing.assert_array_equal(np.asarray(out, np.float32), cases.rounded(lhs @ rhs, out.dtype))


@pytest.mark.parametrize(
    ("sizes", "transposed", "out_dtype"),
    [((131, 136, 200), False, None), ((3, 72, 8), True, F32)],
)
def test_on_one_device(sizes, transposed, out_dtype):
    product(*sizes, seed=1, transposed=transposed, out_dtype=out_dtype, config=NARROW_STAGES)


def drawn(seed: int) -> tuple:
    """Sizes, tiles and how rhs lies, of a seed."""
    rng = np.random.default_rng(seed)
    m = int(rng.integers(1, 300))
    k, n = (8 * int(rng.integers(1, 40)) for _ in range(2))
    tiles = (NARROW_STAGES, NARROWEST, NARROW, LARGE)[int(rng.integers(4))]
    return (m, k, n), tiles, bool(rng.integers(2)), (None, F32)[int(rng.integers(2))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_sizes_on_one_device(seed):
    sizes, tiles, transposed, out_dtype = drawn(seed)
    product(*sizes, seed=seed, transposed=transposed, out_dtype=out_dtype, config=tiles)


def check(name, devices, shape, *, seed=0, **options):
    with simulator_of(seed):
        lhs, rhs = cases.operands(*cases.whole(name, devices, *shape), seed=seed)
        out = cases.run(name, lhs, rhs, devices=devices, **options)
    np.testing.assert_array_equal(out, cases.rounded(lhs @ rhs, BF16))


def simulator_of(seed):
    return st.simulate(seed=seed, core_count=2)


# More than one tile of rows: a shard's last tile, and one of another device's rows.
@pytest.mark.parametrize("name", cases.FORMS)
def test_on_several_devices(name):
    check(name, 2, (131, 72, 136), config=None)


def test_rows_that_devices_do_not_share_evenly():
    lhs, rhs = cases.operands(133, 2 * 72, 136)
    with simulator_of(0):
        out = cases.run("matmul_all_reduce", lhs, rhs, devices=2, config=None)
    np.testing.assert_array_equal(out, cases.rounded(lhs @ rhs, BF16))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("name", cases.FORMS)
def test_random_sizes_on_several_devices(name, seed):
    rng = np.random.default_rng(seed)
    shape = int(rng.integers(1, 280)), *(int(rng.integers(1, 300)) for _ in range(2))
    if rng.integers(2):
        shape = shape[0], *(-(-size // 8) * 8 for size in shape[1:])
    check(name, int(rng.choice([2, 3, 4])), shape, seed=seed, config=None)


@pytest.mark.parametrize("name", cases.FORMS)
def test_nothing_is_copied_where_rows_are_multiples_of_16_bytes(name):
    """But by the transposed form, which XLA transposes."""
    m, k, n = cases.whole(name, 2, 136 if name == "all_gather_matmul_n" else 131, 72, 136)
    structs = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((m, k), (k, n))]
    with simulator_of(0):
        program = jax.jit(cases.mapped(name, cases.mesh_of(2), backend="pallas", config=None))
        text = program.lower(*structs).as_text()
    assert not COPIES.search(text), COPIES.findall(text)


@pytest.mark.parametrize("name", cases.FORMS)
def test_the_choice_counts_copies(name):
    def copied(m, k, n, devices=2, tiles=None):
        problem = Problem(
            operation=name,
            sizes=dict(m=m, k=k, n=n),
            types=Types(lhs="bfloat16", out="bfloat16"),
            devices=devices,
            machine=Machine.of_kind("gpu", "NVIDIA H200"),
        )
        kernel = OPERATIONS[name].kernels[0]
        config = kernel.default(problem)
        return kernel.copies(problem, dataclasses.replace(config, tiles=tiles or config.tiles))

    # Rows of 128 bytes; of 16, of small operands and of large ones; and of other ones.
    assert not copied(8192, 8192, 8192)
    few, many = (copied(m, m, m, tiles=LARGE) for m in (1040, 8208))
    assert 0 < few < 1040**2 and 8208**2 < many < 3 * 8208**2 * 2
    assert not copied(8208, 8208, 8208)  # By pairs of blocks.
    assert copied(8202, 8202, 8202) > 8202**2 * 2


def test_few_rows_that_make_no_pieces_are_copied():
    config = gather.Config(gather_first=True)
    assert [config.gathered_rows(rows) for rows in (5, 12, 37, 2)] == [5, 12, 40, 16]
    assert gather.Config().gathered_rows(37) == 37


def test_copies_are_counted_and_said():
    """The same product with rows of 16 bytes is the kernel's."""
    kind = "NVIDIA H200"
    even, odd = (
        st.explain_sizes("all_gather_matmul", m=2048, k=8192, n=n, devices=2, kind=kind).choice
        for n in (28672, 28674)
    )
    assert even.backend == "pallas" and "to copy" not in even.reason
    assert "rows that are no multiples of 128 bytes cost as much as to copy" in odd.reason


@pytest.mark.parametrize(
    ("name", "m", "k", "n", "taken"),
    [
        ("all_gather_matmul", 8184, 8200, 8176, "fused"),  # 1,172 us; XLA 1,191.
        ("matmul_reduce_scatter", 8184, 8208, 8200, "fused"),  # 1,166; 1,309.
        ("all_gather_matmul", 1000, 3072, 8200, "fused"),  # 73.7; XLA 90.4, unfused 77.6.
        ("all_gather_matmul", 4096, 8192, 8200, "fused"),  # 487; XLA 775, unfused 700.
        ("matmul_reduce_scatter", 2048, 8192, 4100, "fused"),  # 143; XLA 204, unfused 189.
        ("all_gather_matmul", 1000, 3072, 8208, "fused"),  # 57.2; 81.2, unfused 67.0.
        ("matmul_reduce_scatter", 11312, 11712, 8, "xla"),  # 84.9; XLA 59.9.
        ("all_gather_matmul_k", 1376, 21968, 16, "xla"),  # 226.7; XLA 208.5.
        ("matmul_all_reduce", 500, 14352, 4104, "xla"),  # 181; 95.8.
    ],
)
def test_the_choice_is_what_was_measured_to_be_faster(name, m, k, n, taken):
    """On 2 x H200, at sizes that no table has."""
    found = st.explain_sizes(name, m=m, k=k, n=n, devices=2, kind="NVIDIA H200").choice
    ours = "unfused" if getattr(found.config, "unfused", False) else "fused"
    assert (ours if found.backend == "pallas" else "xla") == taken, found.reason


def test_rows_that_are_not_aligned_are_left_so_and_cost_more_the_more_they_are_used():
    (kernel,), config = OPERATIONS["all_gather_matmul"].kernels, gather.Config()
    lost = [
        kernel.copies(
            Problem(
                operation="all_gather_matmul",
                sizes=dict(m=8192, k=8200, n=n),  # Only the rows of lhs are not aligned.
                types=Types(lhs="bfloat16", rhs="bfloat16", out="bfloat16"),
                devices=2,
                machine=Machine.of_kind("gpu", "NVIDIA H200"),
            ),
            config,
        )
        for n in (12288, 24576)
    ]
    lhs = jax.ShapeDtypeStruct((4096, 8200), BF16)
    assert lost == [lhs.size * 2, 2 * lhs.size * 2]
    assert jax.eval_shape(lambda x: config.padded(x, columns=6144), lhs).shape == lhs.shape


class _Buffers:
    """Buffers of the store, of which a place is known by the name of the view."""

    shape = (LARGE.warpgroups, LARGE.store_buffers, PIECE_ROWS, 64)

    def __init__(self, name: str):
        self.name = name

    @property
    def at(self) -> _Buffers:
        return self

    def __getitem__(self, place):
        return self.name, place


def test_a_residual_is_loaded_into_the_view_that_is_stored(monkeypatch):
    """Not into that of the warps: its 8 x 64 tiles are not cut off at the edge of a matrix."""
    loaded = []
    monkeypatch.setattr(plgpu, "copy_gmem_to_smem", lambda window, at, barrier: loaded.append(at))
    views = dict(out=_Buffers("out"), stored=_Buffers("stored"))
    apart = dict(edge=None, filled=None, free=None)
    pieces = Pieces(config=LARGE, row=0, width=LARGE.tile_n, **views, **apart)
    parts = BesideParts(function=jnp.add, window=lambda tile, *piece: piece)
    loading = Applying(
        beside=Beside(kinds=("elements",)),
        parts=parts,
        pieces=pieces,
        vectors=(),
        full=None,
        empty=None,
        loaded=_Buffers("loaded"),
    )
    for index in range(len(pieces.places)):
        loading.load_piece(Tile(0, 0, 0), index)
    assert len(loaded) == LARGE.warpgroups * len(pieces.places)
    assert {name for name, _ in loaded} == {"stored"}


@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "transposed"])
@pytest.mark.parametrize("name", ["all_gather_matmul", "all_gather_matmul_k", "matmul_all_reduce"])
def test_operands_that_are_used_often_are_copied_to_aligned_rows(name, turned, monkeypatch):
    monkeypatch.setattr(padding, "REUSE", dict(lhs=1, rhs=1))
    m, k, n = cases.whole(name, 2, 131, 72, 136)
    lhs, rhs = cases.operands(m, k, n)
    (of_lhs, of_rhs), out = cases.specs(name)
    call = functools.partial(
        cases.FORMS[name], axis_name="x", rhs_transposed=turned, backend="pallas"
    )
    specs = of_lhs, P(*of_rhs[::-1]) if turned else of_rhs
    program = jax.jit(
        jax.shard_map(call, mesh=cases.mesh_of(2), in_specs=specs, out_specs=out, check_vma=False)
    )
    operands = [jnp.asarray(x, BF16) for x in (lhs, rhs.T if turned else rhs)]
    with simulator_of(0):
        assert program.lower(*operands).as_text().count("stablehlo.pad") == 2
        found = np.asarray(program(*operands), np.float32)
    np.testing.assert_array_equal(found, cases.rounded(lhs @ rhs, BF16))


@pytest.mark.parametrize("gated", [False, True], ids=["bias", "pair"])
def test_epilogues_with_arrays(gated):
    """The residual comes through the store's buffers, as they are stored; pairs by 8 x 64 tiles."""
    np.testing.assert_array_equal(*with_arrays(gated, config=gather.Config()))


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        dict(gather_axis="k", config=gather_k.Config()),
        dict(config=gather.Config(gather_first=True)),
    ],
    ids=["k", "first"],
)
def test_epilogues_with_arrays_of_other_gathers(options, transposed):
    np.testing.assert_array_equal(*with_arrays(True, transposed=transposed, **options))


@pytest.mark.parametrize(("columns", "copies"), [(256, 1), (264, 2)])
def test_a_stage_of_rhs_is_loaded_by_a_copy_for_64_columns(columns, copies):
    """Of an array of whole tiles by one; the others are those of lhs, and of the results."""
    lhs, rhs = (jnp.ones(shape, BF16) for shape in ((128, 192), (192, columns)))
    with st.simulate(core_count=2) as report:
        jax.block_until_ready(
            jax.jit(functools.partial(local_matmul, config=NARROW_STAGES))(lhs, rhs)
        )
    tiles, steps, pieces = -(-columns // 128), 3, 4
    assert report.statistics.copies == tiles * (steps * (1 + copies) + pieces)
