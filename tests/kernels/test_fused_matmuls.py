"""The fused matmuls in the simulator: the right numbers, for any shape, type, team and order."""

from __future__ import annotations

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import BF16, F16, F32
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from selection import slow

import stretto as st
from stretto.distributed.errors import BackendUnavailableError
from stretto.kernels.fused import all_gather_matmul, all_gather_matmul_k
from stretto.kernels.operations import OPERATIONS

pytestmark = pytest.mark.usefixtures("two_multiprocessors")
SCATTERED = ("matmul_reduce_scatter", "matmul_all_reduce")
OTHERS = ("all_gather_matmul", "matmul_all_reduce")


def mostly(quick, *values):
    """All of `values` for the gather, `quick` alone for its reverse: what differs is the team's."""
    names = [("all_gather_matmul", value, ()) for value in (quick, *values)]
    names += [("matmul_reduce_scatter", quick, ()), ("matmul_all_reduce", quick, pytest.mark.slow)]
    names += [(name, value, pytest.mark.slow) for name in SCATTERED for value in values]
    return [pytest.param(name, value, marks=marks) for name, value, marks in names]


@pytest.fixture
def two_multiprocessors():
    """Two blocks a device: enough that they meet, and quick."""
    with st.simulate(seed=0, core_count=2) as report:
        yield report
    assert report.ok, str(report)


def check(name, devices, shape, *, dtype=BF16, out_dtype=None, seed=0, **options):
    lhs, rhs = cases.operands(*cases.whole(name, devices, *shape), seed=seed)
    out = cases.run(name, lhs, rhs, devices=devices, dtype=dtype, out_dtype=out_dtype, **options)
    np.testing.assert_array_equal(out, cases.rounded(lhs @ rhs, out_dtype or dtype))


# Every size meets every operation, and every number of devices every size, but not all at once. On
# many devices the others are the gather, or its reverse, of more steps.
@pytest.mark.parametrize(
    ("name", "devices", "shape"),
    [
        pytest.param(
            *(name, devices, shape),
            marks=pytest.mark.slow if devices == 8 or (name in SCATTERED and devices == 5) else (),
        )
        for devices, shape in [
            (2, (65, 72, 136)),
            (3, (63, 72, 136)),
            (5, (1, 8, 8)),
            (8, (65, 8, 200)),
        ]
        for name in cases.OPERATIONS
    ],
)
def test_any_shape_and_team(name, devices, shape):
    check(name, devices, shape)


@pytest.mark.parametrize(
    ("devices", "shape"),
    [slow(2, (65, 72, 136)), (3, (63, 200, 136)), slow(5, (1, 8, 8)), slow(8, (40, 8, 200))],
)
def test_shards_gathered_as_one_matrix(devices, shape):
    check("all_gather_matmul", devices, shape, config=cases.AS_ONE)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.OPERATIONS)
@pytest.mark.parametrize("devices", [2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("m", [1, 63, 65, 96])
@pytest.mark.parametrize("n", [8, 136, 200])
@pytest.mark.parametrize("k", [8, 72])
def test_every_shape_and_team(name, devices, m, k, n):
    check(name, devices, (m, k, n))


@pytest.mark.parametrize("k", [72, 200])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("all_gather_matmul", all_gather_matmul.Config(pull_rows=1)),
        ("all_gather_matmul", all_gather_matmul.Config(pull_rows=1, gather_first=True)),
        ("all_gather_matmul_k", all_gather_matmul_k.Config(pull_rows=1)),
    ],
    ids=["m", "m whole", "k"],
)
def test_pieces_of_one_row(name, config, k):
    """They are contiguous, and would not be cut off at the end of a row."""
    check(name, 2, (9, k, 8), config=config)


@pytest.mark.parametrize("name", ["matmul_reduce_scatter", *map(slow, OTHERS)])
def test_more_tiles_than_blocks(name):
    check(name, 2, (264, 200, 328))


# The types are those of the main loop, which all share; each stores its results by itself.
@pytest.mark.parametrize(
    ("name", "dtype", "out_dtype"),
    [
        ("all_gather_matmul", BF16, F32),
        ("all_gather_matmul", F16, None),
        *((name, F16, BF16) for name in cases.OPERATIONS),
        *(pytest.param(name, BF16, F32, marks=pytest.mark.slow) for name in SCATTERED),
        *(pytest.param(name, F16, None, marks=pytest.mark.slow) for name in SCATTERED),
    ],
)
def test_types(name, dtype, out_dtype):
    check(name, 2, (40, 72, 72), dtype=dtype, out_dtype=out_dtype)


@pytest.mark.parametrize("name", cases.OPERATIONS)
def test_a_team_of_one_is_the_plain_product(name, two_multiprocessors):
    check(name, 1, (65, 72, 136), backend="auto")
    assert two_multiprocessors.launches == 0


@pytest.mark.parametrize("backend", ["auto", "simulator", "pallas"])
def test_a_simulation_takes_the_kernel(backend, two_multiprocessors):
    check("all_gather_matmul", 2, (8, 64, 64), backend=backend)
    assert two_multiprocessors.launches == 1


@pytest.mark.parametrize("name", ["matmul_reduce_scatter", *map(slow, OTHERS)])
def test_random_numbers_are_as_good_as_xla_makes_them(name):
    m, k, n = cases.whole(name, 4, 48, 256, 72)
    rng = np.random.default_rng(0)
    lhs, rhs = (np.asarray(rng.standard_normal(s), BF16) for s in ((m, k), (k, n)))
    exact = lhs.astype(np.float32) @ rhs.astype(np.float32)
    ours, xla = (
        np.abs(cases.run(name, lhs, rhs, devices=4, backend=backend) - exact)
        for backend in ("pallas", "xla")
    )
    assert ours.max() <= 2 * xla.max()
    assert ours.mean() <= 2 * xla.mean()


@pytest.mark.parametrize(
    "name",
    # The sums are made by the same code.
    ["matmul_reduce_scatter", slow("matmul_all_reduce")],
)
def test_small_terms_are_not_lost_beside_a_large_one(name):
    """256 + 1 is 256 in bfloat16; the float32 sum over devices keeps the ones (B45)."""
    lhs = np.zeros((8, 8 * 8), np.float32)
    lhs[:, ::8] = [256] + 7 * [1]
    out = cases.run(name, lhs, np.ones((8 * 8, 8), np.float32), devices=8)
    np.testing.assert_array_equal(out, cases.rounded(np.full((8, 8), 263.0), BF16))


def test_epilogue():
    lhs, rhs = cases.operands(2 * 40, 16, 2 * 72)
    lhs, rhs = lhs / 4, rhs / 4
    out = cases.run("all_gather_matmul", lhs, rhs, epilogue=jax.nn.gelu, out_dtype=F32)
    np.testing.assert_allclose(out, jax.nn.gelu(jnp.asarray(lhs @ rhs)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # On GPUs every configuration is run, and each is compiled.
@pytest.mark.parametrize("name", cases.OPERATIONS)
def test_candidates_agree(name):
    """Every configuration that the tuner may choose computes the same."""
    configs = list(OPERATIONS[name].kernels[0].candidates(None))
    assert len(set(configs)) == len(configs) >= 2
    for number, config in enumerate(configs):
        check(name, 2, (72, 72, 136), config=config, seed=number)


class TestMeshes:
    def rows(self, name, axes, teams):
        """Two problems with different data, one for each team of the mesh."""
        devices = 2
        sizes = cases.whole(name, devices, 40, 16, 72)
        problems = [cases.operands(*sizes, seed=10 + team) for team in range(teams)]
        lhs, rhs = (jnp.asarray(np.stack(x), BF16) for x in zip(*problems, strict=True))
        return lhs, rhs, np.stack([left @ right for left, right in problems])

    @pytest.mark.parametrize(("name", "axis"), mostly("x", "y"))
    def test_two_rings_at_once_do_not_mix(self, name, axis):
        other = "y" if axis == "x" else "x"
        lhs, rhs, want = self.rows(name, axis, teams=2)
        in_specs, out_spec = cases.specs(name, axis)
        with_other = [P(other, *spec) for spec in (*in_specs, out_spec)]

        def call(lhs, rhs):
            return cases.OPERATIONS[name](lhs[0], rhs[0], axis, out_dtype=F32)[None]

        program = jax.shard_map(
            call,
            mesh=cases.mesh_of(2, 2),
            in_specs=tuple(with_other[:2]),
            out_specs=with_other[2],
            check_vma=False,
        )
        np.testing.assert_array_equal(np.asarray(jax.jit(program)(lhs, rhs)), want)

    @pytest.mark.parametrize(("name", "shape"), mostly((2, 2), (1, 3), (3, 1)))
    def test_a_tuple_of_axes_is_one_team(self, name, shape):
        lhs, rhs = cases.operands(*cases.whole(name, int(np.prod(shape)), 40, 16, 72))
        program = cases.mapped(name, cases.mesh_of(*shape), ("x", "y"), out_dtype=F32)
        out = jax.jit(program)(jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16))
        np.testing.assert_array_equal(np.asarray(out), lhs @ rhs)

    @pytest.mark.parametrize(("name", "order"), mostly([3, 2, 1, 0], [2, 0, 3, 1], [1, 2, 3, 4]))
    def test_a_permuted_mesh_gives_right_rows_or_an_error(self, name, order):
        devices = np.array(jax.devices())[order]
        mesh = Mesh(devices, ("x",), axis_types=(AxisType.Auto,))
        lhs, rhs = cases.operands(*cases.whole(name, 4, 8, 64, 64))
        operands = jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16)
        program = jax.jit(cases.mapped(name, mesh, out_dtype=F32, config=None))
        np.testing.assert_array_equal(np.asarray(program(*operands)), lhs @ rhs)  # By XLA.
        program = jax.jit(cases.mapped(name, mesh, out_dtype=F32, backend="pallas"))
        with pytest.raises(BackendUnavailableError, match=r"its devices in the order.*make_mesh"):
            program(*operands)
