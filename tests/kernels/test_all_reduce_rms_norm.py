"""`all_reduce_rms_norm`, simulated and by XLA: numbers, types, derivatives, what is refused."""

from __future__ import annotations

import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from problems import problem

import stretto as st
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.commands import bench
from stretto.benchmarks.measurements import results
from stretto.distributed import copies
from stretto.distributed.semaphores import Semaphore
from stretto.distributed.simulator import DeadlockError
from stretto.kernels.choice import speed
from stretto.kernels.collectives import summed_norm
from stretto.kernels.operations import OPERATIONS

RECORD = OPERATIONS["all_reduce_rms_norm"]
EPSILON = 1e-3


def drawn(devices, m, n, x="bfloat16", residual="bfloat16", weight="bfloat16", seed=0):
    """All devices' x `[devices, m, n]` of whole numbers, the residual, and a weight."""
    rng = np.random.default_rng(seed)
    terms = rng.integers(-4, 5, (devices, m, n)).astype(jnp.dtype(x))
    return (
        jnp.asarray(terms),
        jnp.asarray(rng.integers(-4, 5, (m, n)), residual),
        jnp.asarray(1 + 0.25 * rng.integers(-2, 3, n), weight),
    )


def expected(terms, residual, weight):
    """In float64."""
    h = np.asarray(residual, np.float64) + np.asarray(terms, np.float64).sum(0)
    scale = 1 / np.sqrt((h * h).mean(1, keepdims=True) + EPSILON)
    return h, h * scale * np.asarray(weight, np.float64)


def mapped(devices, check_vma=True, axes=("x",), shape=None, **options):
    """A function of stacked terms, residual and weight; results are the same on all devices."""
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(shape or (devices,)), axes)
    axis = axes[0] if len(axes) == 1 else axes

    def one(terms, residual, weight):
        call = functools.partial(st.all_reduce_rms_norm, epsilon=EPSILON, **options)
        return call(terms[0], residual, weight, axis)

    specs = P(axes), P(), P()
    return jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)


def every_device(devices, operands):
    """What each device holds as a result, to see that they are bitwise the same."""
    mesh = cases.mesh_of(devices)

    def one(terms, residual, weight):
        found = st.all_reduce_rms_norm(terms[0], residual, weight, "x", epsilon=EPSILON)
        return jax.tree.map(lambda x: x[None], found)

    specs = P("x"), P(), P()
    call = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(call)(*operands))


@pytest.fixture
def two_shots(monkeypatch, traces_apart):
    """Whatever the size, of more than two devices; a program on three, which is traced once."""
    monkeypatch.setattr(summed_norm, "ONE_SHOT_BYTES", 0)
    return jax.jit(mapped(3, check_vma=False))


def check(devices, operands, seed=0, **simulation):
    with st.simulate(seed=seed, **simulation) as report:
        found_h, found = every_device(devices, operands)
    assert report.ok and report.launches == 1, str(report)
    h, rows = expected(*operands)
    for device in range(devices):
        np.testing.assert_array_equal(found_h[device].astype(np.float64), h)
        limit = 2 * float(jnp.finfo(found.dtype).eps)
        np.testing.assert_allclose(found[device].astype(np.float64), rows, rtol=limit, atol=limit)
        assert found_h[device].tobytes() == found_h[0].tobytes()
        assert found[device].tobytes() == found[0].tobytes()


# Without room to meet by itself, and with it.
@pytest.mark.parametrize(
    ("devices", "m", "n", "core_count"),
    [
        (2, 5, 256, 2),
        (3, 1, 768, 4),
        pytest.param(2, 5, 256, 4, marks=pytest.mark.slow),
    ],
)
def test_one_shot(devices, m, n, core_count):
    check(devices, drawn(devices, m, n), core_count=core_count)


@pytest.mark.parametrize(
    ("devices", "m", "n", "core_count"),
    [
        (3, 7, 256, 4),
        (4, 3, 1024, 2),
        *(pytest.param(5, 2, 512, cores, marks=pytest.mark.slow) for cores in (2, 4)),
    ],
)
def test_two_shots(two_shots, devices, m, n, core_count):
    check(devices, drawn(devices, m, n), seed=1, core_count=core_count)


@pytest.mark.parametrize(
    "types",
    [("float16",) * 3, ("float32",) * 3, ("bfloat16", "float32", "float32")],
)
def test_types(types):
    x, residual, weight = types
    operands = drawn(2, 3, 256, x, residual, weight)
    check(2, operands, core_count=2)
    h, rows = jax.eval_shape(mapped(2), *operands)
    assert (h.dtype, rows.dtype) == (residual, x)


@pytest.mark.parametrize("config", [*summed_norm.Config.candidates(), summed_norm.Config(stages=1)])
def test_configurations_give_the_same(config):
    operands = drawn(2, 9, 256)
    with st.simulate(core_count=3) as report:
        found = jax.jit(mapped(2, config=config))(*operands)
    assert report.ok, str(report)
    np.testing.assert_array_equal(found[0].astype(np.float64), expected(*operands)[0])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["random", "pct", "round_robin"])
@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
def test_many_orders(two_shots, devices, schedule):
    for seed in range(4):
        operands = drawn(devices, 2 * devices + 1, 512, seed=seed)
        if devices > 1:
            check(devices, operands, seed=seed, schedule=schedule, core_count=4)


@pytest.mark.slow
def test_over_two_axes_and_many_times():
    terms, residual, weight = drawn(4, 3, 256)
    call = mapped(4, axes=("x", "y"), shape=(2, 2))

    def twice(terms, residual, weight):
        h, rows = call(terms, residual, weight)
        return call(rows[None] + 0 * terms, h, weight)

    with st.simulate(seed=2, core_count=2) as report:
        found = jax.jit(twice)(terms, residual, weight)
    assert report.ok and report.launches == 2, str(report)
    plain = mapped(4, axes=("x", "y"), shape=(2, 2), backend="xla")
    h, rows = plain(terms, residual, weight)
    right = plain(rows[None] + 0 * terms, h, weight)
    for got, want in zip(found, right, strict=True):
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=0.1)


@pytest.mark.parametrize("check_vma", [True, False])
def test_derivatives_are_those_of_xla(check_vma):
    """Reverse and forward, and the residual's and the weight's are not added up twice."""
    operands = drawn(2, 3, 256, "float32", "float32", "float32")
    rng = np.random.default_rng(5)
    bars = [jnp.asarray(rng.normal(size=(3, 256)), "float32") for _ in range(2)]
    dots = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in operands]

    def both(backend):
        call = mapped(2, check_vma, backend=backend)
        _, pull = jax.vjp(call, *operands)
        pulled = pull(tuple(bars))
        return pulled, jax.jvp(call, operands, tuple(dots))[1]

    with st.simulate(core_count=2) as report:
        found = jax.jit(lambda: both("auto"))()
    assert report.ok and report.launches, str(report)
    right = jax.jit(lambda: both("xla"))()
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_the_derivative_may_be_taken_again():
    operands = drawn(2, 2, 256, "float32", "float32", "float32")

    def twice(backend):
        def loss(residual):
            call = mapped(2, backend=backend)
            return jnp.sum(jnp.sin(call(operands[0], residual, operands[2])[1]))

        return jax.jvp(jax.grad(loss), (operands[1],), (jnp.ones_like(operands[1]),))[1]

    with st.simulate(core_count=2) as report:
        found = twice("auto")
    assert report.ok and report.launches
    np.testing.assert_allclose(found, twice("xla"), rtol=1e-3, atol=1e-4)


def test_every_device_need_not_hold_the_same_other_axes():
    """x and residual of their own along another axis of the mesh; the weight is for all."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("d", "x"))
    terms, residual, weight = drawn(4, 3, 256, "float32", "float32", "float32")
    residual = jnp.stack([residual, 2 * residual])

    def loss(backend, weight):
        def one(terms, residual, weight):
            call = functools.partial(st.all_reduce_rms_norm, epsilon=EPSILON, backend=backend)
            h, rows = call(terms[0], residual[0], weight, "x")
            return h[None], rows[None]

        specs = P(("d", "x")), P("d"), P()
        call = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P("d"))
        h, rows = call(terms, residual, weight)
        return jnp.sum(h * jnp.cos(h)) + jnp.sum(jnp.sin(rows))

    with st.simulate(core_count=2) as report:
        found = jax.jit(jax.value_and_grad(functools.partial(loss, "auto")))(weight)
    assert report.ok and report.launches
    right = jax.value_and_grad(functools.partial(loss, "xla"))(weight)
    for got, want in zip(found, right, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


# --- Each step is needed --------------------------------------------------------------------------


def broken(program, seed=0, core_count=2, **simulation):
    """Runs `two_shots`; returns whether the numbers are right, and the report."""
    operands = drawn(3, 7, 256, seed=seed)
    settings = dict(seed=seed, core_count=core_count, on_finding="record") | simulation
    with st.simulate(**settings) as report:
        found = program(*operands)
    return np.array_equal(found[0].astype(np.float64), expected(*operands)[0]), report


def test_without_a_bug_nothing_is_found(two_shots):
    for seed in range(3):
        right, report = broken(two_shots, seed)
        assert right and report.ok, str(report)


@pytest.mark.parametrize(("semaphore", "cores"), [("closing", 2), ("closing", 4), ("opening", 4)])
def test_a_dropped_signal_is_a_deadlock(two_shots, monkeypatch, semaphore, cores):
    original = Semaphore.signal

    def maybe(self, *args, **kwargs):
        if self.site.semaphore != semaphore:
            original(self, *args, **kwargs)

    monkeypatch.setattr(Semaphore, "signal", maybe)
    with pytest.raises(DeadlockError, match=rf"semaphore {semaphore}"):
        broken(two_shots, core_count=cores)


def test_a_wait_for_the_end_left_out_is_found(two_shots, monkeypatch):
    original = Semaphore.wait

    def maybe(self, *args, **kwargs):
        if self.site.semaphore != "closing":
            original(self, *args, **kwargs)

    monkeypatch.setattr(Semaphore, "wait", maybe)
    found = [broken(two_shots, seed)[1] for seed in range(3)]
    assert any("after" in str(report) for report in found if not report.ok)
    assert not all(report.ok for report in found)


def test_a_wait_for_loads_left_out_is_a_race(monkeypatch, two_shots):
    monkeypatch.setattr(plgpu, "barrier_wait", lambda *args, **kwargs: None)
    found = [broken(two_shots, seed) for seed in range(3)]
    assert any(not right or not report.ok for right, report in found)


def test_rooms_that_are_stored_from_and_filled_again_are_a_race(monkeypatch, two_shots):
    original = plgpu.wait_smem_to_gmem

    def only_at_the_end(n, wait_read_only=False):
        if not wait_read_only:
            original(n, wait_read_only=wait_read_only)

    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", only_at_the_end)
    found = [broken(two_shots, seed, core_count=1)[1] for seed in range(4)]
    assert not all(report.ok for report in found)


def test_results_that_are_not_stored_on_peers_are_missing_there(two_shots, monkeypatch):
    # The results' refs are made before the members', whose loads stay as they are.
    original = copies.remote
    made = []

    def remote(ref, team, peer):
        made.append(ref)
        return ref if len(made) <= 4 else original(ref, team, peer)

    monkeypatch.setattr(copies, "remote", remote)
    right, _ = broken(two_shots)
    assert not right


# --- What is chosen, and refused ------------------------------------------------------------------


def test_auto_leaves_it_to_xla_until_it_is_measured():
    sizes = dict(m=138, n=6144)
    case = Case(operation=RECORD, sizes=sizes, dtype="bfloat16", devices=2)
    asked = case.problem(problem(kind="NVIDIA H100").machine)
    found = speed.faster(RECORD, RECORD.kernels[0], asked)
    assert found.backend == "xla" and "never timed beside XLA" in found.reason


@pytest.mark.parametrize(
    ("sizes", "types", "reason"),
    [
        ((3, 257), {}, "multiple of 256 elements, not n=257"),
        ((3, 1 << 17), {}, "do not fit into shared memory"),
        ((0, 256), {}, "the array is empty"),
        ((3, 256), dict(x="float64"), "x is float64"),
        ((3, 256), dict(weight="float8_e4m3fn"), "not float8_e4m3fn"),
    ],
)
def test_what_the_kernel_leaves_to_xla(sizes, types, reason):
    with jax.enable_x64(True):
        operands = drawn(2, *sizes, **types)
        with pytest.raises(ValueError, match=reason):
            jax.eval_shape(mapped(2, backend="pallas"), *operands)
        h, rows = jax.eval_shape(mapped(2), *operands)
    assert h.shape == rows.shape == sizes


def test_a_residual_that_varies_is_left_to_xla():
    terms, residual, weight = drawn(2, 3, 256)

    def one(terms, residual, weight):
        return st.all_reduce_rms_norm(terms[0], residual[0], weight, "x", backend="simulator")

    specs = P("x"), P("x"), P()
    call = jax.shard_map(one, mesh=cases.mesh_of(2), in_specs=specs, out_specs=P("x"))
    with pytest.raises(ValueError, match="residual varies over"):
        jax.eval_shape(call, terms, jnp.stack([residual] * 2), weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, r, w: (x[0, 0], r, w), r"x has shape \(256,\); it must be \[rows, n\]"),
        (lambda x, r, w: (x[0], r[:1], w), r"residual has shape \(1, 256\); with x \(3, 256\)"),
        (lambda x, r, w: (x[0], r, w[:1]), r"weight has shape \(1,\); with x"),
        (lambda x, r, w: (x[0].astype(int), r, w), "x is int32; it must be floating-point"),
        (lambda x, r, w: (x[0], r, 1.0), "it must be an array"),
    ],
)
def test_operands_are_refused(change, message):
    mesh = cases.mesh_of(2)

    def one(*operands):
        return st.all_reduce_rms_norm(*change(*operands), "x")

    call = jax.shard_map(one, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P())
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, *drawn(2, 3, 256))


def test_a_negative_epsilon_is_refused():
    call = jax.shard_map(
        lambda x, r, w: st.all_reduce_rms_norm(x[0], r, w, "x", epsilon=-1.0),
        mesh=cases.mesh_of(2),
        in_specs=(P("x"), P(), P()),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match=r"epsilon=-1\.0 must not be negative"):
        jax.eval_shape(call, *drawn(2, 3, 256))


def test_what_fits_into_shared_memory():
    rooms = summed_norm.Rooms.of
    assert rooms(2, 6144, (2, 2), 3) == summed_norm.Rooms(stages=3, stores=2)
    assert rooms(8, 8192, (2, 2), 3) == summed_norm.Rooms(stages=1, stores=1)
    assert rooms(8, 16384, (4, 4), 3) is None
    for n in range(256, 16384, 256):
        found = rooms(4, n, (2, 4), 4)
        if found is not None:
            row = n * (found.stages * (4 * 2 + 4) + found.stores * 6 + 4)
            assert row + summed_norm.SMALL_BYTES <= summed_norm.SMEM_BYTES


def test_it_is_timed_with_both_results(tmp_path):
    path = tmp_path / "r.json"
    options = ["all_reduce_rms_norm", "--shapes", "5x768", "--devices", "2", "--repeats", "4"]
    options += ["--peers", "auto,xla", "--no-torch", "--json", str(path)]
    assert bench.main(options) == 0
    (found,) = results.read(path).measurements
    assert found.of("auto").relative_error == 0 and not found.missing
