"""The matmuls of operands in 8 bits with scales: by XLA, and in the simulator."""

from __future__ import annotations

import dataclasses
import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaled_cases
from fused_cases import BF16, F32
from jax.sharding import PartitionSpec as P
from scaled_cases import E4M3, E5M2, NAMES, powers_of_two

import stretto as st
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.peers import peers
from stretto.distributed.errors import BackendUnavailableError
from stretto.distributed.semaphores import Semaphore
from stretto.kernels.choice import choose
from stretto.kernels.engine.blackwell import tile_config as blackwell
from stretto.kernels.engine.hopper.tile_config import BLOCKS, BLOCKS_BY_THREE, LARGE_FP8, TileConfig
from stretto.kernels.fused import (
    all_gather_matmul,
    grouped_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from stretto.kernels.fused.pull_config import PullConfig
from stretto.kernels.operations import SCALED
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types

SMALL = TileConfig(tile_n=64, tile_k=128, num_stages=2, store_buffers=1)
CONFIGS = {
    "all_gather_matmul": all_gather_matmul.Config(tiles=SMALL, chunk_columns=256),
    "matmul_reduce_scatter": matmul_reduce_scatter.Config(tiles=SMALL),
    "matmul_all_reduce": matmul_all_reduce.Config(tiles=SMALL),
}
OF_BLACKWELL = {
    blocks: blackwell.TileConfig(
        blocks=blocks,
        tile_m=128 * blocks,
        tile_n=64 * blocks,
        tile_k=128,
        num_stages=2,
        store_buffers=1,
    )
    for blocks in (1, 2)
}
slow = pytest.mark.slow


def simulated(name, kind, devices, shape, *, seed=0, target="h100", **options):
    options = {"config": CONFIGS[name]} | options
    with st.simulate(seed=seed, core_count=2, on_finding="record", target=target) as report:
        out, want = scaled_cases.run(name, kind, devices, shape, **options)
    return np.array_equal(out, want), report


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_by_xla(name, kind):
    out, want = scaled_cases.run(name, kind, 4, (40, 384, 128), dtypes=(E4M3, E5M2), backend="xla")
    np.testing.assert_array_equal(out, want)


# Per device, m_shard x k x n_shard: rows and columns that fill no tile, and a k that is no multiple
# of 128. Scales of blocks are cut at each device's k, so that stays one where it is split.
@pytest.mark.parametrize(
    ("name", "kind", "devices", "shape"),
    [
        ("all_gather_matmul", "row", 3, (72, 200, 72)),
        ("all_gather_matmul", "block", 2, (136, 300, 128)),
        pytest.param("matmul_reduce_scatter", "row", 2, (72, 200, 72), marks=slow),
        ("matmul_reduce_scatter", "block", 3, (40, 256, 136)),
        ("matmul_all_reduce", "block", 2, (72, 256, 72)),
        pytest.param("all_gather_matmul", "tensor", 4, (40, 128, 64), marks=slow),
        pytest.param("all_gather_matmul", "block", 4, (264, 1200, 128), marks=slow),
        pytest.param("matmul_reduce_scatter", "tensor", 4, (40, 128, 64), marks=slow),
        pytest.param("matmul_all_reduce", "row", 3, (72, 200, 136), marks=slow),
    ],
)
def test_in_the_simulator(name, kind, devices, shape):
    right, report = simulated(name, kind, devices, shape, dtypes=(E4M3, E5M2))
    assert report.ok, str(report)
    assert right


@pytest.mark.parametrize(
    ("name", "kind", "devices", "shape", "blocks"),
    [
        ("all_gather_matmul", "row", 2, (136, 200, 72), 2),
        ("matmul_reduce_scatter", "block", 3, (40, 256, 136), 1),
        pytest.param("all_gather_matmul", "block", 2, (136, 300, 128), 1, marks=slow),
        pytest.param("all_gather_matmul", "row", 3, (72, 200, 72), 1, marks=slow),
        pytest.param("matmul_reduce_scatter", "row", 2, (72, 200, 72), 2, marks=slow),
        pytest.param("matmul_all_reduce", "block", 2, (72, 256, 72), 2, marks=slow),
    ],
)
def test_with_tiles_of_blackwell(name, kind, devices, shape, blocks):
    """By one block, or by two together."""
    config = dataclasses.replace(CONFIGS[name], tiles=OF_BLACKWELL[blocks])
    right, report = simulated(name, kind, devices, shape, config=config, target="b200")
    assert report.ok, str(report)
    assert right


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("all_gather_matmul", (136, 300, 128)),
        pytest.param("matmul_reduce_scatter", (200, 256, 136), marks=slow),
        pytest.param("matmul_all_reduce", (200, 256, 136), marks=slow),
    ],
)
def test_with_three_warpgroups_that_multiply(name, shape):
    """Tiles of 192 rows, of which the scales of 64 are pulled at once."""
    slots = dict(pull_slots=3) if name == "all_gather_matmul" else {}
    config = dataclasses.replace(CONFIGS[name], tiles=BLOCKS_BY_THREE, **slots)
    right, report = simulated(name, "block", 2, shape, config=config)
    assert report.ok, str(report)
    assert right


@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_narrower_tiles_with_more_stages_are_the_default_of_sums_whose_waves_they_fill(name):
    """15.5 waves of 256 columns are 20.8 of 192, and 3.9 are 5.2, which take 6."""
    kernel = SCALED[f"{name}_fp8"].kernels[0]

    def columns(m, n):
        types = Types(lhs="float8_e4m3fn", rhs="float8_e4m3fn", out="bfloat16", scales="row")
        machine = Machine.of_kind("gpu", "NVIDIA H200")
        sizes = dict(m=m, k=8192, n=n)
        problem = Problem(operation=name, sizes=sizes, types=types, devices=2, machine=machine)
        config = kernel.default(problem)
        config.check(problem)
        assert config.tiles in [c.tiles for c in kernel.candidates(problem)]
        return config.tiles.tile_n

    assert columns(8192, 8192) == 192
    assert columns(2048, 8192) == 256


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_three_warpgroups_are_the_default_for_many_rows_that_fill_their_tiles(name, out):
    """Of blocks: 4096 rows a device are 22 tiles of 192, 1024 are for two warpgroups."""
    record = SCALED[f"{name}_fp8_block"]
    machine = Machine.of_kind("gpu", "NVIDIA H200")

    def tiles(rows):
        types = Types(lhs="float8_e4m3fn", rhs="float8_e4m3fn", out=out, scales="block")
        sizes = dict(m=2 * rows, k=8192, n=8192)
        problem = Problem(operation=name, sizes=sizes, types=types, devices=2, machine=machine)
        config = record.kernels[0].default(problem)
        config.check(problem)
        return config.tiles

    assert tiles(4096) == tiles(2048) == BLOCKS_BY_THREE
    assert tiles(1024) == tiles(128) == BLOCKS


@pytest.mark.parametrize("gated", [False, True])
def test_an_epilogue_with_arrays_follows_the_kernel(gated):
    """XLA applies it to the kernel's product, here exact."""
    lhs, rhs = cases.whole_numbers(0, 32, 128), cases.whole_numbers(1, 128, 128)
    of_lhs, of_rhs = scaled_cases.scales("row", 32, 128, 128)
    bias = cases.whole_numbers(4, 64)
    gate, up = np.split(scaled_cases.exact(lhs, rhs, of_lhs, of_rhs), 2, axis=1)
    want = np.maximum(gate, 0) * up + bias if gated else np.hstack([gate + bias, up + bias])
    function = (lambda g, u, b: jnp.maximum(g, 0) * u + b) if gated else (lambda y, b: y + b)
    found = []

    def call(x, y, s, t, b):
        given = dict(
            rhs_transposed=True,
            lhs_scale=s,
            rhs_scale=(t[:64], t[64:]),
            epilogue=st.Epilogue(function, b, gated=gated),
            out_dtype=F32,
            config=CONFIGS["all_gather_matmul"],
        )
        found.append(st.explain(st.all_gather_matmul, x, (y[:64], y[64:]), "x", **given))
        out = st.all_gather_matmul(x, (y[:64], y[64:]), "x", **given)
        return out if gated else jnp.concatenate(out, axis=1)

    rows = P("x")
    program = jax.shard_map(
        call,
        mesh=cases.mesh_of(2),
        in_specs=(rows, P(), rows, P(), P()),
        out_specs=P(),
        check_vma=False,
    )
    with st.simulate(core_count=2) as report:
        values = jnp.asarray(lhs, E4M3), jnp.asarray(rhs, E4M3)
        out = jax.jit(program)(*values, of_lhs, of_rhs, jnp.asarray(bias, F32))
    assert report.ok
    np.testing.assert_array_equal(out, want)
    said = "XLA applies the epilogue to the kernel's product, since its operands have scales"
    assert said in found[0].reason


@slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["row", "block"])
def test_in_any_order_of_steps(kind, seed):
    for name in NAMES:
        right, report = simulated(name, kind, 3, (72, 256, 128), seed=seed)
        assert right and report.ok, str(report)


def test_rhs_that_is_gathered_is_lhs_of_the_transposed_problem():
    """`gather_axis="n"`, of a batch, by the kernel; an epilogue with an array follows it."""
    lhs, rhs = cases.whole_numbers(0, 4, 20, 200), cases.whole_numbers(1, 144, 200)
    of_lhs, of_rhs = powers_of_two(2, 4, 20, 1), powers_of_two(3, 144, 1)
    bias = cases.whole_numbers(4, 144)

    def call(x, y, s, t, b):
        return st.all_gather_matmul(
            x,
            y,
            "x",
            gather_axis="n",
            rhs_transposed=True,
            lhs_scale=s,
            rhs_scale=t,
            epilogue=(lambda z, b: jnp.maximum(z + b, 0), b),
            out_dtype=F32,
            config=CONFIGS["all_gather_matmul"],
        )

    rows = P("x")
    program = jax.shard_map(
        call,
        mesh=cases.mesh_of(2),
        in_specs=(rows, rows, rows, rows, P()),
        out_specs=rows,
        check_vma=False,
    )
    with st.simulate(core_count=2) as report:
        values = jnp.asarray(lhs, E4M3), jnp.asarray(rhs, E5M2)
        out = jax.jit(program)(*values, of_lhs, of_rhs, jnp.asarray(bias, F32))
    assert report.ok, str(report)
    want = (lhs * of_lhs) @ (rhs * of_rhs).T + bias
    np.testing.assert_array_equal(out, np.maximum(want, 0))


@slow
def test_several_right_hand_sides_and_an_epilogue():
    lhs, rhs = cases.whole_numbers(0, 80, 256), cases.whole_numbers(1, 192, 256)
    of_lhs, of_rhs = scaled_cases.scales("block", 80, 256, 192)
    want = scaled_cases.exact(lhs, rhs, of_lhs, of_rhs)

    def call(x, y, s, t):
        sides, of_sides = (y[:128], y[128:]), (t[:1], t[1:])
        outs = st.all_gather_matmul(
            x,
            sides,
            "x",
            rhs_transposed=True,
            lhs_scale=s,
            rhs_scale=of_sides,
            epilogue=jax.nn.relu,
            out_dtype=F32,
            config=CONFIGS["all_gather_matmul"],
        )
        return jnp.concatenate(outs, 1)

    rows = P("x")
    program = jax.shard_map(
        call,
        mesh=cases.mesh_of(2),
        in_specs=(rows, P(), rows, P()),
        out_specs=P(),
        check_vma=False,
    )
    with st.simulate(core_count=2) as report:
        out = jax.jit(program)(jnp.asarray(lhs, E4M3), jnp.asarray(rhs, E4M3), of_lhs, of_rhs)
    assert report.ok
    np.testing.assert_array_equal(out, np.maximum(want, 0))


def test_a_batch_along_another_axis():
    """`[b, s / D, k]` with `axis=1`, and its scales alike."""
    lhs, rhs = cases.whole_numbers(0, 2, 24, 128), cases.whole_numbers(1, 64, 128)
    of_lhs, of_rhs = scaled_cases.powers_of_two(2, 2, 24, 1), scaled_cases.powers_of_two(3, 64, 1)
    want = (lhs * of_lhs) @ (rhs * of_rhs).T

    def gather(x, y, s, t):
        given = dict(lhs_scale=s, rhs_scale=t, out_dtype=F32, rhs_transposed=True)
        return st.all_gather_matmul(x, y, "x", axis=1, **given)

    def scatter(x, y, s, t):
        given = dict(lhs_scale=s, rhs_scale=t, out_dtype=F32, rhs_transposed=True)
        return st.matmul_reduce_scatter(x, y, "x", axis=1, **given)

    tokens, features = P(None, "x"), P(None, None, "x")
    for call, in_specs, out_spec in (
        (gather, (tokens, P(), tokens, P()), P()),
        (scatter, (features, P(None, "x"), P(), P()), tokens),
    ):
        program = jax.shard_map(
            call, mesh=cases.mesh_of(2), in_specs=in_specs, out_specs=out_spec, check_vma=False
        )
        out = jax.jit(program)(jnp.asarray(lhs, E4M3), jnp.asarray(rhs, E4M3), of_lhs, of_rhs)
        np.testing.assert_array_equal(out, want)


# --- Groups of rows -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "tiles"),
    [
        ("row", SMALL),
        pytest.param("block", SMALL, marks=slow),
        pytest.param("block", BLOCKS_BY_THREE, marks=slow),
    ],
)
def test_groups(kind, tiles):
    np.testing.assert_array_equal(*scaled_cases.groups(kind, "xla"))
    with st.simulate(core_count=2) as report:
        out, want = scaled_cases.groups(
            kind, "simulator", config=grouped_matmul.Config(tiles=tiles)
        )
    assert report.ok
    np.testing.assert_array_equal(out, want)


# --- Steps that are needed ------------------------------------------------------------------------


@pytest.fixture
def fresh_traces():
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("fresh_traces")
def test_scales_that_nobody_waits_for_are_a_race(monkeypatch):
    """The wait for the first chunk counts the pieces of the rows alone."""
    from stretto.kernels.fused import gathering_by_shards

    original = gathering_by_shards._stream
    without = lambda refs, plan, kept, shape, scales: original(refs, plan, kept, shape, 0)  # noqa: E731
    monkeypatch.setattr(gathering_by_shards, "_stream", without)
    runs = (simulated("all_gather_matmul", "row", 2, (72, 128, 64), seed=seed) for seed in range(3))
    assert any("race" in report.kinds() for _, report in runs)


@slow
@pytest.mark.usefixtures("fresh_traces")
def test_a_wait_for_one_scale_too_few_is_found(monkeypatch):
    original = Semaphore.wait

    def impatient(self, value=1, **kwargs):
        original(self, value - (self.site.semaphore == "received"), **kwargs)

    monkeypatch.setattr(Semaphore, "wait", impatient)
    _, report = simulated("all_gather_matmul", "block", 2, (72, 256, 128))
    assert "race" in report.kinds()


# --- What serves, and what is refused -------------------------------------------------------------

X = jax.ShapeDtypeStruct((16, 256), E4M3)
ONE = jax.ShapeDtypeStruct((), F32)


def explained(name, *operands, **options):
    def call(*xs):
        found.append(st.explain(getattr(st, name), *xs, "x", **options))
        return jnp.zeros(())

    found: list = []
    mesh = cases.mesh_of(2)
    program = jax.shard_map(
        call, mesh=mesh, in_specs=(P(),) * len(operands), out_specs=P(), check_vma=False
    )
    jax.eval_shape(program, *operands)
    return found[0]


@pytest.mark.parametrize("name", NAMES)
def test_explain_says_what_serves(name):
    choice = explained(name, X, X, lhs_scale=ONE, rhs_transposed=True)
    assert choice.backend == "xla" and "cpu, not GPUs" in choice.reason
    assert choice.problem.operation == f"{name}_fp8"
    assert choice.problem.types == ("float8_e4m3fn", "bfloat16", "float8_e4m3fn", "row")
    blocks = jax.ShapeDtypeStruct((16, 2), F32)
    choice = explained(name, X, X, lhs_scale=blocks, rhs_transposed=True)
    assert choice.problem.operation == f"{name}_fp8_block"
    choice = explained(name, X, jax.ShapeDtypeStruct((256, 16), E4M3), lhs_scale=ONE)
    assert "K-major" in choice.reason and "rhs_transposed=True" in choice.reason


def traced(name, *operands, specs=None, **options):
    call = functools.partial(getattr(st, name), axis_name="x", **options)
    program = jax.shard_map(
        call, mesh=cases.mesh_of(2), in_specs=P(), out_specs=P(), check_vma=False
    )
    return jax.eval_shape(program, *operands)


@pytest.mark.parametrize("name", NAMES)
def test_scales_that_do_not_fit(name):
    with pytest.raises(ValueError, match=rf"{name}: lhs_scale has shape \(16,\); it must be \(\)"):
        traced(name, X, X, lhs_scale=jnp.ones(16), rhs_transposed=True)
    with pytest.raises(ValueError, match="rhs is bfloat16, and scales are for operands of float8"):
        traced(name, X, jax.ShapeDtypeStruct((16, 256), BF16), lhs_scale=jnp.ones(()),
               rhs_transposed=True)  # fmt: skip
    with pytest.raises(ValueError, match="there are 2 scales for 1 operands"):
        traced(name, X, X, rhs_scale=(jnp.ones(()),) * 2, rhs_transposed=True)
    with pytest.raises(BackendUnavailableError, match="K-major"):
        traced(
            name,
            X,
            jax.ShapeDtypeStruct((256, 16), E4M3),
            lhs_scale=jnp.ones(()),
            backend="simulator",
        )


def test_what_is_not_built_for_scales():
    given = dict(lhs_scale=jnp.ones(()), rhs_transposed=True)
    wide = jax.ShapeDtypeStruct((16, 512), E4M3)
    with pytest.raises(BackendUnavailableError, match="columns of lhs have scales of each device"):
        traced("all_gather_matmul", X, wide, gather_axis="k", backend="simulator", **given)
    with pytest.raises(BackendUnavailableError, match="lhs has blocks of 1 x 128"):
        blocks = given | dict(lhs_scale=jnp.ones((16, 2)))
        traced("all_gather_matmul", X, X, gather_axis="n", backend="simulator", **blocks)
    with pytest.raises(
        NotImplementedError, match=r"gather values and scales by stretto\.all_gather"
    ):
        traced("all_gather_matmul", X, X, return_gathered=True, **given)
    with pytest.raises(ValueError, match="unfused=True is not built for operands with scales"):
        config = matmul_reduce_scatter.Config(tiles=LARGE_FP8, unfused=True)
        traced("matmul_reduce_scatter", X, X, config=config, backend="simulator", **given)
    with pytest.raises(ValueError, match="gather_first=True is not built"):
        config = all_gather_matmul.Config(tiles=LARGE_FP8, gather_first=True)
        traced("all_gather_matmul", X, X, config=config, backend="simulator", **given)
    with pytest.raises(ValueError, match="tile_n=256 must divide 128"):
        given["lhs_scale"] = jnp.ones((16, 2))
        config = matmul_all_reduce.Config(tiles=LARGE_FP8)
        traced("matmul_all_reduce", X, X, config=config, backend="simulator", **given)


@pytest.mark.parametrize("backend", ["xla", "simulator"])
def test_there_is_no_derivative(backend):
    def loss(x):
        values, scale = st.quantise(x)
        given = dict(lhs_scale=scale, rhs_transposed=True, backend=backend)
        return jnp.sum(st.matmul_all_reduce(values, values, "x", **given).astype(F32))

    program = jax.shard_map(
        jax.grad(loss), mesh=cases.mesh_of(2), in_specs=P(), out_specs=P(), check_vma=False
    )
    with pytest.raises(NotImplementedError, match=r"differentiate stretto.fp8.matmul_all_reduce"):
        jax.eval_shape(program, jax.ShapeDtypeStruct((16, 256), F32))


@pytest.mark.parametrize("kind_of_gpu", ["NVIDIA H200", "NVIDIA B200"])
def test_memory_that_scales_take(kind_of_gpu):
    """The default configurations fit, scales and the pieces that they are pulled in included."""
    from stretto.kernels.operations import matmuls
    from stretto.kernels.problem.machine import Machine
    from stretto.kernels.problem.problem import Problem, Types

    for records in (
        matmuls.SCALED_GATHER,
        matmuls.SCALED_REDUCE_SCATTER,
        matmuls.SCALED_ALL_REDUCE,
    ):
        for kind, record in records.items():
            for rows, out in ((8192, "bfloat16"), (8192, "float32"), (64, "bfloat16")):
                problem = Problem(
                    operation=record.name,
                    sizes=dict(m=rows, k=8192, n=8192),
                    types=Types(lhs="float8_e4m3fn", rhs="float8_e4m3fn", out=out, scales=kind),
                    devices=2,
                    machine=Machine.of_kind("gpu", kind_of_gpu),
                )
                (kernel,) = record.kernels
                if kernel.obstacle(problem) is not None:
                    assert (kind, kind_of_gpu) == ("mx", "NVIDIA H200")
                    continue
                kernel.default(problem).check(problem)
                tried = list(kernel.candidates(problem))
                assert tried
                for config in tried if out == "bfloat16" else []:
                    config.check(problem)
    assert isinstance(matmuls.SCALED_GATHER["row"].kernels[0].default(problem), PullConfig)


def test_whole_arrays():
    """`stretto.sharded` splits scales as their operands."""
    lhs, rhs = cases.whole_numbers(0, 16, 256), cases.whole_numbers(1, 32, 256)
    of_lhs, of_rhs = scaled_cases.scales("row", 16, 256, 32)
    given = dict(lhs_scale=jnp.asarray(of_lhs), rhs_scale=jnp.asarray(of_rhs), out_dtype=F32)
    call = st.sharded(st.all_gather_matmul, mesh=cases.mesh_of(2), in_specs=[P("x"), P("x")])
    values = jnp.asarray(lhs, E4M3), jnp.asarray(rhs, E4M3)
    out = jax.jit(lambda x, y: call(x, y, "x", rhs_transposed=True, **given))(*values)
    np.testing.assert_array_equal(out, scaled_cases.exact(lhs, rhs, of_lhs, of_rhs))


def test_vmap():
    """A launch for each of a batch; XLA's products alike."""
    lhs, rhs = cases.whole_numbers(0, 2, 16, 128), cases.whole_numbers(1, 64, 128)
    of_lhs, of_rhs = scaled_cases.powers_of_two(2, 2, 16, 1), scaled_cases.powers_of_two(3, 64, 1)

    def call(x, y, s, t):
        given = dict(lhs_scale=s, rhs_scale=t, out_dtype=F32, rhs_transposed=True)
        return st.all_gather_matmul(x, y, "x", **given)

    program = jax.shard_map(
        jax.vmap(call, (0, None, 0, None)),
        mesh=cases.mesh_of(2),
        in_specs=(P(None, "x"), P(), P(None, "x"), P()),
        out_specs=P(),
        check_vma=False,
    )
    operands = jnp.asarray(lhs, E4M3), jnp.asarray(rhs, E4M3), of_lhs, of_rhs
    np.testing.assert_array_equal(jax.jit(program)(*operands), (lhs * of_lhs) @ (rhs * of_rhs).T)


# --- What benchmarks and tables know --------------------------------------------------------------


@pytest.mark.parametrize("name", SCALED)
def test_a_case_of_a_benchmark(name):
    """Its operands are what the public function takes, and its types what tables are asked for."""
    record = SCALED[name]
    sizes = {size: 4 if size == "g" else 1024 for size in record.sizes}
    case = Case(operation=record, sizes=sizes, dtype="bfloat16", devices=2)
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.operands]
    program = jax.shard_map(
        case.call("xla", axes="x"),
        mesh=cases.mesh_of(2),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    with choose.recorded() as choices:
        out = jax.eval_shape(program, *operands)
    assert out.dtype == BF16
    problem = case.problem(choices[0].problem.machine)
    assert problem.types == choices[0].problem.types
    assert problem.operation == name
    (alone,) = peers.PEERS["matmul"].candidates_for(case, cases.mesh_of(2))
    alone_operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in alone.operands]
    product = jax.eval_shape(alone.body, *alone_operands)
    m, _, n = case.work.product
    assert product.dtype == BF16 and product.size == m * n


def test_nobody_has_timed_it_so_auto_leaves_it_to_xla(monkeypatch):
    gpu = Machine(platform="gpu", kind="NVIDIA H200")
    monkeypatch.setattr(Machine, "of_mesh", classmethod(lambda cls: gpu))
    monkeypatch.setattr(choose, "_unsuitable_devices", lambda problem: None)
    choice = explained("all_gather_matmul", X, X, lhs_scale=ONE, rhs_transposed=True)
    assert choice.backend == "xla" and "never timed beside XLA" in choice.reason
