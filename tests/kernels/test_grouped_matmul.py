"""`grouped_matmul` in the simulator: groups of any size, both layouts of rhs, both derivatives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import BF16, F32, rounded, whole_numbers

import stretto as st
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.fused.group_tables import k_tiles_of, row_tiles
from stretto.kernels.fused.grouped_matmul import Config
from stretto.kernels.operations.grouped_matmul import product_of_groups

SMALL = Config(tiles=TileConfig(tile_n=128, num_stages=3, store_buffers=2))
# m, k, n and the sizes of groups: none, one row, more than a tile, rows of no group.
CASES = {
    "even": (256, 128, 128, (64, 64, 64, 64)),
    "uneven": (300, 72, 136, (1, 7, 0, 200, 60)),
    "one group": (70, 64, 200, (70,)),
    "few rows": (128, 128, 128, (0, 0, 5)),
    "no rows": (64, 64, 64, (0, 0)),
}
# With groups of every kind, and with none.
SOME = ("uneven", "no rows")


def some_cases(*transposed: bool):
    """(case, transposed): slow where the case is not one of `SOME`, or the layout not named."""
    return pytest.mark.parametrize(
        ("case", "transposed"),
        [
            pytest.param(
                case,
                turned,
                id=f"{name}-{turned}",
                marks=() if name in SOME and turned in transposed else pytest.mark.slow,
            )
            for name, case in CASES.items()
            for turned in (False, True)
        ],
    )


def operands(case, transposed: bool):
    m, k, n, sizes = case
    lhs, rhs = whole_numbers(m, m, k), whole_numbers(n, len(sizes), k, n)
    given = rhs.swapaxes(1, 2) if transposed else rhs
    return lhs, rhs, [jnp.asarray(lhs, BF16), jnp.asarray(given, BF16), jnp.array(sizes, jnp.int32)]


def groups(sizes) -> list[slice]:
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def product(lhs, rhs, sizes) -> np.ndarray:
    out = np.zeros((len(lhs), rhs.shape[2]), np.float32)
    for rows, matrix in zip(groups(sizes), rhs, strict=True):
        out[rows] = lhs[rows] @ matrix
    return out


def simulated(program, *arrays, seed=0):
    with st.simulate(seed=seed, core_count=3) as report:
        out = jax.tree.map(np.asarray, jax.jit(program)(*arrays))
    assert report.ok, str(report)
    return out, report


def test_rows_of_no_group_may_be_left_out():
    """They are not stored then; as the layer of experts wants it, whose room is half empty."""
    case = CASES["few rows"]
    lhs, rhs, arrays = operands(case, False)
    call = functools.partial(
        product_of_groups, rhs_transposed=False, zeros=False, backend="simulator"
    )
    out, _ = simulated(call, *arrays)
    used = sum(case[3])
    wanted = product(lhs, rhs, case[3])[:used]
    np.testing.assert_array_equal(out[:used].astype(np.float32), rounded(wanted, BF16))
    assert np.isnan(out[used:].astype(np.float32)).all()  # As the simulator fills memory.


@some_cases(False, True)
def test_product(case, transposed):
    lhs, rhs, arrays = operands(case, transposed)
    call = functools.partial(
        st.grouped_matmul, rhs_transposed=transposed, config=SMALL, out_dtype=F32
    )
    out, report = simulated(call, *arrays)
    assert report.launches == 1
    np.testing.assert_array_equal(out, product(lhs, rhs, case[3]))


@some_cases(False)
def test_derivatives(case, transposed):
    lhs, rhs, arrays = operands(case, transposed)
    bar = whole_numbers(5, case[0], case[2], largest=1)

    def loss(x, y, sizes, **options):
        out = st.grouped_matmul(x, y, sizes, rhs_transposed=transposed, out_dtype=F32, **options)
        return jnp.sum(out * bar)

    derivatives = jax.grad(loss, (0, 1))
    fused, report = simulated(functools.partial(derivatives, config=SMALL), *arrays)
    assert report.launches == 2
    lhs_bar = product(bar, rhs.swapaxes(1, 2), case[3])
    rhs_bar = np.stack([lhs[rows].T @ bar[rows] for rows in groups(case[3])])
    wanted = lhs_bar, rhs_bar.swapaxes(1, 2) if transposed else rhs_bar
    for found in (fused, derivatives(*arrays, backend="xla")):
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32), rounded(y, BF16))


def test_derivatives_of_any_order_of_any_batch_by_xla():
    """`lax.ragged_dot` has neither a derivative of its derivative nor a batch of both operands."""
    m, k, n, sizes = CASES["uneven"]
    batch = jnp.array([sizes, sizes[::-1]], jnp.int32)
    operands = whole_numbers(1, 2, m, k) * 0.1, whole_numbers(2, 2, len(sizes), k, n) * 0.1

    def masked(x, y, sizes):
        ends = jnp.cumsum(sizes)
        rows = jnp.arange(m)[:, None]
        member = (rows >= ends - sizes) & (rows < ends)
        return jnp.einsum("mk,mg,gkn->mn", x, member.astype(x.dtype), y)

    def second_derivatives(product):
        def loss(x, y, sizes):
            return jnp.sum(jnp.sin(product(x, y, sizes)))

        def norm(x, y, sizes):
            return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, y, sizes))

        return jax.jit(jax.vmap(jax.grad(norm, (0, 1))))(*operands, batch)

    found = second_derivatives(functools.partial(st.grouped_matmul, backend="xla"))
    for got, want in zip(found, second_derivatives(masked), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


def test_rows_of_no_group_are_zero_whatever_they_hold():
    """Nothing of theirs is multiplied, so that NaN in them stays there."""
    lhs = np.full((64, 64), np.nan, np.float32)
    lhs[:9] = 1
    arrays = jnp.asarray(lhs, BF16), jnp.ones((2, 64, 64), BF16), jnp.array([4, 5], jnp.int32)
    call = functools.partial(st.grouped_matmul, config=SMALL)
    fused, _ = simulated(call, *arrays)
    for out in (fused, st.grouped_matmul(*arrays, backend="xla")):
        np.testing.assert_array_equal(np.asarray(out[:9], np.float32), 64)
        np.testing.assert_array_equal(np.asarray(out[9:], np.float32), 0)


def test_nan_stays_in_its_group():
    """Tiles begin with rows of the group before, and end with rows of the one after."""
    sizes = (13, 70, 45)
    lhs = whole_numbers(1, 128, 64)
    lhs[12], lhs[83] = np.nan, np.inf
    arrays = jnp.asarray(lhs, BF16), jnp.ones((3, 64, 64), BF16), jnp.array(sizes, jnp.int32)

    def rhs_bar(x, y, sizes):
        return jax.grad(
            lambda y: jnp.sum(st.grouped_matmul(x, y, sizes, config=SMALL, out_dtype=F32))
        )(y)

    found, _ = simulated(rhs_bar, *arrays)
    assert [bool(np.isfinite(x.astype(np.float32)).all()) for x in found] == [False, True, False]


MOST = 2**31 - 1


@pytest.mark.parametrize(
    ("sizes", "dtype", "cut"),
    [
        ((40, -3, 100), "int32", (40, 0, 24)),
        ((40, MOST, MOST), "int32", (40, 24, 0)),  # Their sum is above 2^31.
        ((MOST, MOST, 5), "int32", (64, 0, 0)),
        ((40, 3, 2**32 - 1), "uint32", (40, 3, 21)),
        ((40, 3, 120), "int8", (40, 3, 21)),
    ],
)
def test_sizes_that_do_not_fit(sizes, dtype, cut):
    """Rows beyond m are cut off; a negative size counts as none."""
    lhs, rhs = whole_numbers(0, 64, 64), whole_numbers(1, 3, 64, 64)
    arrays = jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16), jnp.asarray(np.array(sizes, dtype))
    call = functools.partial(st.grouped_matmul, config=SMALL, out_dtype=F32)
    fused, _ = simulated(call, *arrays)
    plain = st.grouped_matmul(*arrays, out_dtype=F32, backend="xla")
    for out in (fused, plain):
        np.testing.assert_array_equal(out, product(lhs, rhs, cut))


def test_sizes_that_do_not_fit_in_8_bits():
    """The scale of all rows sees those of groups alone."""
    x = jnp.ones((16, 16)).at[8:].set(3)
    recipe = st.fp8.Recipe(granularity="tensor")
    out = st.fp8.grouped_matmul(x, jnp.ones((2, 16, 16)), jnp.array([MOST, 9]), recipe=recipe)
    np.testing.assert_allclose(out, 16 * np.asarray(x), rtol=0.05)


def test_a_second_call_with_fewer_rows():
    lhs, rhs, arrays = operands(CASES["even"], False)
    call = functools.partial(st.grouped_matmul, config=SMALL, out_dtype=F32)
    with st.simulate(core_count=3) as report:
        program = jax.jit(call)
        for sizes in ((100, 80, 60, 16), (3, 0, 9, 1)):
            out = np.asarray(program(*arrays[:2], jnp.array(sizes, jnp.int32)))
            np.testing.assert_array_equal(out, product(lhs, rhs, sizes))
    assert report.ok and report.launches == 2


@pytest.mark.parametrize("seed", range(6))
def test_tables(seed):
    """Every row is in one tile's own part, and every row of a group is contracted once."""
    draw = np.random.default_rng(seed)
    m, count = 512, int(draw.integers(1, 9))
    sizes = draw.multinomial(draw.integers(0, m + 1), draw.dirichlet(np.ones(count)))
    most = m // 128 + count + 1
    table = np.asarray(jax.jit(row_tiles, static_argnums=(1, 2, 3))(jnp.array(sizes), m, 128, most))
    number = table[most, :1]
    seen = np.zeros(m, int)
    owner = np.repeat(np.arange(count + 1), [*sizes, m - sizes.sum()])
    for group, first, start, end in table[: int(number[0])]:
        rows = np.arange(8 * first + start, 8 * first + end)
        seen[rows] += 1
        assert (owner[rows] == group).all()
    assert (seen == 1).all()
    tiles_of = jax.jit(k_tiles_of, static_argnums=(1, 2))
    whole, copied = jax.tree.map(np.asarray, tiles_of(jnp.array(sizes), m, 64))
    for rows, (first, tiles, others), loose in zip(groups(sizes), whole, copied, strict=True):
        taken = [*range(8 * first, 8 * first + 64 * tiles), *(x for x in loose if x < m)]
        assert sorted(map(int, taken)) == list(range(rows.start, rows.stop))
        assert others <= 2


class TestChoice:
    def explained(self, *, rhs_dtype=BF16, **options):
        structs = [
            jax.ShapeDtypeStruct(*x)
            for x in (((256, 64), BF16), ((4, 64, 64), rhs_dtype), ((4,), jnp.int32))
        ]
        return st.explain(st.grouped_matmul, *structs, **options)

    def test_on_a_cpu(self):
        choice = self.explained()
        assert choice.backend == "xla" and "the devices are cpu" in choice.reason
        assert str(choice).startswith("grouped_matmul 256x64x64x4 bfloat16 on 1 x cpu")

    def test_in_a_simulation(self):
        with st.simulate(core_count=2):
            assert self.explained().backend == "simulator"


@pytest.mark.parametrize(
    ("shapes", "sizes", "message"),
    [
        ([(8, 16), (16, 8)], [8], r"rhs has shape \(16, 8\); it must be \[groups, k, n\]"),
        ([(8, 16), (2, 24, 8)], [4, 4], "has k=16 columns and rhs .* has k=24 rows"),
        ([(8, 16), (2, 16, 8)], [8], r"group_sizes is int32\[1\]; it must be int32\[2\]"),
        ([(8, 16), (2, 16, 8)], [4.0, 4.0], r"group_sizes is float32\[2\]; it must be int32"),
    ],
)
def test_bad_input(shapes, sizes, message):
    lhs, rhs = (jnp.zeros(shape, BF16) for shape in shapes)
    with pytest.raises(ValueError, match=f"grouped_matmul: .*{message}|{message}"):
        st.grouped_matmul(lhs, rhs, jnp.array(sizes))
