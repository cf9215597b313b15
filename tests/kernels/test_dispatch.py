"""Which implementation serves a call, what is refused, and what `explain` says of it."""

from __future__ import annotations

import functools
import importlib
import re

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import BF16, F32
from jax.sharding import PartitionSpec as P
from problems import choose, entry, problem

import stretto as st
from stretto.benchmarks.cases.case import Case
from stretto.distributed.errors import BackendUnavailableError, StrettoError
from stretto.kernels.choice import choose as choosing
from stretto.kernels.choice import config_data, tables
from stretto.kernels.choice.choice import Choice
from stretto.kernels.engine.blackwell.tile_config import TileConfig as BlackwellTiles
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.fused import all_gather_matmul as all_gather_matmul_kernel
from stretto.kernels.operations import KNOWN, OPERATIONS
from stretto.kernels.problem import node_config
from stretto.kernels.problem.machine import Machine

everywhere = pytest.mark.parametrize("name", cases.OPERATIONS)


def _place_of_config(name):
    """From where users import the configuration of an operation's kernel."""
    found = importlib.import_module(f"stretto.kernels.fused.{name}").Config
    assert getattr(importlib.import_module(found.__module__), found.__qualname__) is found
    return f"{found.__module__}.{found.__qualname__}"


def on_devices(call, *arrays, devices=2, specs=None):
    """Calls `call` inside `shard_map`, on operands that every device holds whole."""
    mesh = cases.mesh_of(devices)
    program = jax.shard_map(
        call, mesh=mesh, in_specs=specs or P(), out_specs=P(None), check_vma=False
    )
    return jax.jit(program)(*arrays)


@pytest.fixture
def no_tables(monkeypatch):
    monkeypatch.setattr(tables, "table_for", tables.Table)


@everywhere
class TestErrors:
    def fails(self, name, message, *shapes, dtypes=(BF16, BF16), **options):
        call = functools.partial(cases.OPERATIONS[name], axis_name="x", **options)
        operands = [jnp.zeros(s, d) for s, d in zip(shapes, dtypes, strict=True)]
        with pytest.raises(ValueError, match=message):
            on_devices(call, *operands)

    def test_sizes_that_do_not_match(self, name):
        message = rf"{name}: lhs \(8, 16\) has k=16 columns and rhs \(24, 8\) has k=24 rows"
        self.fails(name, message, (8, 16), (24, 8))

    def test_not_a_matrix(self, name):
        message = r"lhs has shape \(16,\); it must be a matrix or have more dimensions before"
        self.fails(name, message, (16,), (16, 8))
        self.fails(name, r"rhs has shape \(2, 16, 8\); it must be a matrix", (8, 16), (2, 16, 8))
        self.fails(name, r"rhs has shape \(16,\); it must be a matrix", (8, 16), (16,))

    def test_not_an_array(self, name):
        message = (
            r"rhs=\[1\.0, 2\.0\] is of type list; it must be an array. Convert it with jnp.asarray"
        )
        with pytest.raises(ValueError, match=message):
            on_devices(
                lambda x: cases.OPERATIONS[name](x, [[1.0, 2.0], [3.0, 4.0]], "x"),
                jnp.zeros((2, 2), BF16),
            )

    def test_types(self, name):
        self.fails(
            name, "lhs has dtype bool; it must be of numbers", (8, 8), (8, 8), dtypes=("?", "?")
        )
        self.fails(
            name, "lhs is bfloat16 and rhs is float32; cast", (8, 8), (8, 8), dtypes=(BF16, F32)
        )
        self.fails(
            name, "out_dtype=int32 must be of the same kind", (8, 8), (8, 8), out_dtype=jnp.int32
        )

    def test_backend_and_axes(self, name):
        self.fails(
            name, "backend='cuda' is not one of 'auto', 'pallas'", (8, 8), (8, 8), backend="cuda"
        )
        call = cases.OPERATIONS[name]
        x = jnp.zeros((8, 8), BF16)
        for axes, message in [
            ("y", r"axis 'y' is not among the enclosing shard_map's axes \('x',\)"),
            (0, r"axis 0 is not among the enclosing shard_map's axes \('x',\)"),
            ((), "axis_name is empty"),
            (("x", "x"), "names an axis twice"),
        ]:
            with pytest.raises(ValueError, match=message):
                on_devices(lambda x: call(x, x, axes), x)  # noqa: B023

    def test_outside_of_shard_map(self, name):
        x = jnp.zeros((8, 8), BF16)
        with pytest.raises(ValueError, match=r"axis 'x' is not bound: call this inside"):
            cases.OPERATIONS[name](x, x, "x")

    def test_pallas_on_a_cpu(self, name):
        message = "'pallas' cannot serve this call: the devices are cpu, not GPUs.*backend='auto'"
        self.fails(name, message, (8, 8), (8, 8), backend="pallas")
        with pytest.raises(BackendUnavailableError) as caught:
            on_devices(
                lambda x: cases.OPERATIONS[name](x, x, "x", backend="pallas"),
                jnp.zeros((8, 8), BF16),
            )
        assert isinstance(caught.value, StrettoError)

    @pytest.mark.parametrize("backend", ["simulator", "pallas"])
    def test_types_that_the_kernel_does_not_take(self, name, backend):
        message = "the kernel takes bfloat16 and float16, not float32"
        self.fails(name, message, (8, 8), (8, 8), dtypes=(F32, F32), backend=backend)
        message = "the kernel stores bfloat16, float16 and float32, not float8_e4m3fn"
        self.fails(name, message, (8, 8), (8, 8), out_dtype=jnp.float8_e4m3fn, backend=backend)

    def test_a_config_that_cannot_be_built(self, name):
        kind = OPERATIONS[name].kernels[0].Config
        for tiles, message in [
            (dict(tile_m=64), "tile_m=64 must be 128 or 192"),
            (dict(tile_n=100), "tile_n=100 must be 64, 128, 192 or 256"),
            (dict(tile_k=32), "tile_k=32 must be 64"),
            (dict(tile_k=128), "tile_k=128 must be 64 for bfloat16"),
            (dict(num_stages=1), "num_stages=1 must be at least 2"),
            (dict(raster_width=0), "raster_width=0 must be at least 1"),
            (dict(store_buffers=0), "store_buffers=0 must be at least 1"),
            (dict(tile_m=384, tile_n=256), "192 x 256 needs more registers"),
            (dict(num_stages=12), r"needs \d+ bytes of shared memory and a block has"),
        ]:
            config = kind(tiles=TileConfig(**tiles))
            self.fails(name, message, (8, 8), (8, 8), config=config, backend="simulator")
        message = "pull_slots=1 must be at least 2"
        config = kind(pull_slots=1)
        self.fails(name, message, (8, 8), (8, 8), config=config, backend="simulator")

    @pytest.mark.parametrize("backend", ["auto", "xla", "simulator"])
    def test_a_config_of_another_type(self, name, backend):
        for config in (3, {"pull_slots": 2}, TileConfig(), node_config.Config(kernel=TileConfig())):
            message = rf"{name}: config=.* is a .*; pass a {re.escape(_place_of_config(name))}, or"
            self.fails(name, message, (8, 8), (8, 8), config=config, backend=backend)


@pytest.mark.parametrize("name", ["matmul_reduce_scatter"])
def test_rows_that_cannot_be_dealt_out(name):
    with pytest.raises(ValueError, match="m=9 must be a multiple of the 2 devices; pad it to 10"):
        on_devices(
            lambda x, y: cases.OPERATIONS[name](x, y, "x"), jnp.zeros((9, 8)), jnp.zeros((8, 8))
        )


@everywhere
def test_float32_falls_back_to_xla(name):
    lhs, rhs = cases.operands(*cases.whole(name, 2, 6, 8, 8))
    with st.simulate(core_count=2) as report:
        out = cases.run(name, lhs, rhs, dtype=F32, backend="auto")
    np.testing.assert_array_equal(out, lhs @ rhs)
    assert report.launches == 0


@everywhere
@pytest.mark.parametrize("empty", ["m", "k", "n"])
def test_empty_operands(name, empty):
    """No rows on any device, no contraction, or no columns: right, and without a kernel (B37)."""
    m, k, n = cases.whole(name, 2, *(0 if size == empty else 8 for size in "mkn"))
    with st.simulate(core_count=2) as report:
        out = cases.run(name, np.zeros((m, k)), np.zeros((k, n)), backend="auto", out_dtype=F32)
    assert report.launches == 0
    np.testing.assert_array_equal(out, np.zeros((m, n), np.float32))


@everywhere
@pytest.mark.parametrize("empty", ["m", "k", "n"])
def test_gradients_of_empty_operands(name, empty):
    """Zeros. XLA ended the process where there were no columns."""
    m, k, n = cases.whole(name, 2, *(0 if size == empty else 8 for size in "mkn"))
    program = cases.mapped(name, cases.mesh_of(2), backend="auto")
    total = lambda lhs, rhs: program(lhs, rhs).astype(F32).sum()  # noqa: E731
    for found in jax.jit(jax.grad(total, (0, 1)))(jnp.ones((m, k), BF16), jnp.ones((k, n), BF16)):
        assert not np.any(np.asarray(found, np.float32))


@everywhere
def test_nan_and_infinity_stay_in_their_rows_and_columns(name):
    """What pads an operand, or was in a buffer before, never meets them (B46)."""
    lhs, rhs = cases.operands(*cases.whole(name, 2, 9, 8, 8))
    lhs[1, 2] = np.nan
    lhs[3, 1] = np.inf
    lhs[4, :2] = np.inf
    rhs[:2, 0] = [1, -1]
    lhs[5] = -0.0
    with st.simulate(core_count=2):
        out = cases.run(name, lhs, rhs, out_dtype=F32)
    with np.errstate(invalid="ignore"):
        want = lhs @ rhs
    np.testing.assert_array_equal(out, want)


class TestChoice:
    """`auto`, by what is known of the problem."""

    @pytest.mark.usefixtures("no_tables")
    def test_by_estimate(self):
        fused, plain = choose(problem()), choose(problem(m=1, n=64, k=64))
        assert (fused.backend, plain.backend) == ("pallas", "xla")
        assert fused.fused_us < fused.xla_us and plain.xla_us < plain.fused_us
        assert fused.config == all_gather_matmul_kernel.default_config(problem())

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            (dict(kind="NVIDIA A100-SXM4-80GB"), "written for Hopper and Blackwell GPUs and these"),
            (dict(platform="cpu", kind="cpu"), "the devices are cpu"),
            (dict(dtype="float32"), "takes bfloat16 and float16, not float32"),
            (dict(k=0), "an operand is empty"),
        ],
    )
    def test_where_the_kernel_cannot_serve(self, changes, reason):
        """`auto` takes XLA; asking for the kernel is an error, before anything starts (B49)."""
        choice = choose(problem(**changes))
        assert choice.backend == "xla" and reason in choice.reason
        with pytest.raises(BackendUnavailableError, match=reason):
            choose(problem(**changes), "pallas")

    @pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"])
    def test_hopper_of_any_make(self, kind):
        assert choose(problem(kind=kind), "pallas").backend == "pallas"

    def test_blackwell_is_left_to_xla_until_a_table_says_otherwise(self, monkeypatch):
        """The kernels have been compiled and simulated for it, and never run on one."""
        on_b200 = problem(kind="NVIDIA B200")
        choice = choose(on_b200)
        assert choice.backend == "xla" and choice.fused_us is None
        assert "were never run on such a GPU, and no table of NVIDIA B200" in choice.reason
        assert "`stretto tune` writes one" in str(choice)
        asked = choose(on_b200, "pallas")
        assert asked.backend == "pallas" and isinstance(asked.config.tiles, BlackwellTiles)
        assert "but never run on one" in str(asked)
        given = choose(on_b200, config=asked.config)
        assert given.backend == "pallas" and "but never run on one" in given.reason

        data = config_data.to_data(asked.config)
        measured = entry(fused_us=600.0, xla_us=700.0, config=data)
        monkeypatch.setattr(tables, "exists", lambda kind: True)
        monkeypatch.setattr(tables, "table_for", lambda kind: tables.Table(kind, (measured,)))
        choice = choose(on_b200)
        assert choice.backend == "pallas" and choice.config == asked.config
        assert "86% of XLA's time" in choice.reason and "never" not in choice.reason
        far = choose(problem(kind="NVIDIA B200", m=64))
        assert far.backend == "xla" and "for this call" in far.reason

    @pytest.mark.parametrize("name", KNOWN)
    def test_every_operation_is_left_to_xla_on_blackwell(self, name):
        """Collectives, experts, attention and operands in 8 bits, too."""
        operation = KNOWN[name]
        (sizes, *_) = operation.examples.shapes("tiny", 4)
        case = Case(operation=operation, sizes=sizes, dtype="bfloat16", devices=4)
        machine = Machine.of_kind("gpu", "NVIDIA B200")
        choice = choosing.choose(operation, case.problem(machine), "auto")
        assert choice.backend == "xla" and "never run on such a GPU" in choice.reason

    def test_tiles_of_another_architecture(self):
        config = choose(problem(kind="NVIDIA B200"), "pallas").config
        with pytest.raises(ValueError, match=r"are for sm_100, and NVIDIA H100.* is sm_90; pass a"):
            choose(problem(kind="NVIDIA H100 80GB HBM3"), config=config)

    def test_what_is_asked_for(self):
        assert choose(problem(), "xla").backend == "xla"
        assert choose(problem(m=1), "pallas").backend == "pallas"
        config = all_gather_matmul_kernel.Config(pull_rows=8)
        choice = choose(problem(m=1), config=config)
        assert choice.backend == "pallas" and choice.config is config

    def test_one_device_needs_no_communication(self):
        for backend in ("auto", "pallas", "simulator"):
            choice = choose(problem(devices=1), backend)
            assert choice.backend == "xla" and "needs no communication" in choice.reason

    def test_a_measured_entry_decides(self, monkeypatch):
        measured = entry(fused_us=900.0, xla_us=700.0, config={"pull_rows": 8})
        monkeypatch.setattr(tables, "table_for", lambda kind: tables.Table(kind, (measured,)))
        choice = choose(problem())
        assert choice.backend == "xla"
        assert (choice.fused_us, choice.xla_us) == (900.0, 700.0)


class TestExplain:
    def explained(self, *args, devices=2, **options):
        """What `explain` returns inside a `shard_map` over "x", and what it leaves running."""
        found = []

        def call(x):
            found.append(st.explain(*args, **options))
            return x

        on_devices(call, jnp.zeros(2), devices=devices)
        return found[0]

    @everywhere
    def test_it_tells_the_choice_and_the_reason(self, name):
        x = jax.ShapeDtypeStruct((128, 128), BF16)
        choice = self.explained(cases.OPERATIONS[name], x, x, "x")
        assert choice.backend == "xla"
        assert choice.problem.operation == name and choice.problem.devices == 2
        assert f"{name} " in str(choice) and "xla, because the devices are cpu" in str(choice)

    def test_collectives(self):
        x = jax.ShapeDtypeStruct((128, 128), BF16)
        choice = self.explained(st.all_reduce, x, "x", devices=3)
        assert str(choice).startswith("all_reduce 128x128 bfloat16 on 3 x cpu: xla, because")

    def test_in_a_simulation(self):
        x = jax.ShapeDtypeStruct((128, 128), BF16)
        with st.simulate(core_count=2) as report:
            choice = self.explained(st.all_gather_matmul, x, x, "x")
        assert choice.backend == "simulator" and "a simulation encloses" in choice.reason
        assert report.launches == 0

    def test_operands_by_name_and_a_backend(self):
        x = jax.ShapeDtypeStruct((128, 128), BF16)
        choice = self.explained(st.all_gather_matmul, x, x, axis_name="x", backend="xla")
        assert choice.reason == "it was asked for"

    def test_what_the_operation_raises(self):
        x = jax.ShapeDtypeStruct((128, 128), BF16)
        with pytest.raises(ValueError, match="axis 'y' is not among"):
            self.explained(st.all_gather_matmul, x, x, "y")
        with pytest.raises(ValueError, match="not an operation of Stretto"):
            self.explained(jnp.matmul, x, x)
        with pytest.raises(ValueError, match="is not an operation of Stretto"):
            self.explained(jnp.matmul, x, "x")
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            self.explained(st.all_gather_matmul, x, "x")

    def test_times_where_they_are_known(self):
        choice = Choice(
            problem=problem(), backend="pallas", reason="so", fused_us=420.4, xla_us=716.0
        )
        assert str(choice).endswith("pallas, because so (fused 420 us, XLA 716 us)")
