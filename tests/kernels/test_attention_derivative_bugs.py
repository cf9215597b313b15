"""Each step of attention's derivative is needed: without it the simulator, or a number, tells."""

from __future__ import annotations

import jax
import pytest
from attention_derivative_cases import ERROR, OnOne
from attention_kernel_cases import WithoutWaitFor, drawn, seen
from fused_cases import mesh_of
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.handshake import Handshake
from stretto.distributed.semaphores import Semaphore
from stretto.distributed.simulator import SimulationError
from stretto.distributed.team import Team
from stretto.kernels.engine.hopper.attention import derivative_moving, deriving
from stretto.kernels.engine.hopper.attention.derivative_config import DerivativeTiles
from stretto.kernels.engine.hopper.attention.derivative_memory import Memory
from stretto.kernels.fused import attention_derivative
from stretto.kernels.fused.attention_config import Sequence
from stretto.kernels.fused.attention_derivative_moves import Moves

pytestmark = pytest.mark.usefixtures("traces_apart")
SLOW = pytest.mark.slow
SEEDS = range(3)


def found_on_one(seed, *, cores=2, **how):
    """What is found where a block of the grid has several blocks of keys."""
    operands, mask = drawn((1, 384, 2, 64), (1, 384, 1, 64)), seen(1, 384, 384, causal=True)
    program = OnOne(Sequence(causal=True), DerivativeTiles(**how), cores=cores)
    try:
        errors, _, report = program(operands, mask, seed, on_finding="record")
    except SimulationError as error:
        return error.report.kinds() | {"stopped"}
    # Of what is no number as well.
    return report.kinds() | (set() if max(errors) < ERROR["bfloat16"] else {"wrong numbers"})


def leave_out(monkeypatch, name):
    """Nobody waits for these barriers."""
    barriers: list = []
    made = Memory.of

    def of(refs):
        memory = made(refs)
        barriers.append(getattr(memory, name))
        return memory

    monkeypatch.setattr(Memory, "of", of)
    for module in (deriving, derivative_moving):
        monkeypatch.setattr(module, "plgpu", WithoutWaitFor(module.plgpu, barriers))


BARRIERS = (
    "keys_full",
    "keys_done",
    "queries_full",
    "queries_empty",
    "slopes_full",
    "filled",
    "free",
)
QUICK = ("slopes_full",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in BARRIERS]
)
def test_each_barrier_is_needed(monkeypatch, name):
    leave_out(monkeypatch, name)
    assert any(found_on_one(seed, cores=1) for seed in SEEDS)


@SLOW
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("cores", [1, 2])
def test_nothing_is_found_without_a_bug(turns, ordered, cores):
    how = dict(turns=turns, ordered=ordered, cores=cores)
    assert not any(found_on_one(seed, **how) for seed in SEEDS)


def not_cleared(monkeypatch):
    """Blocks add to what others have yet to set to zero."""
    right = Semaphore.wait

    def wait(self, value=1, **how):
        if self.site.semaphore != "cleared":
            right(self, value, **how)

    monkeypatch.setattr(Semaphore, "wait", wait)


def test_sums_begin_with_zeros(monkeypatch):
    not_cleared(monkeypatch)
    assert any("race" in found_on_one(seed) for seed in SEEDS)


def out_of_order(monkeypatch):
    """A block adds to the derivative of queries before those of smaller numbers have."""
    monkeypatch.setattr(Moves, "wait_for_turn", lambda *_: None)


def not_announced(monkeypatch):
    monkeypatch.setattr(Moves, "added", lambda *_: None)


@pytest.mark.parametrize(
    ("bug", "kind"), [(out_of_order, "race"), pytest.param(not_announced, "stopped", marks=SLOW)]
)
def test_the_order_of_sums_is_needed(monkeypatch, bug, kind):
    bug(monkeypatch)
    assert any(kind in found_on_one(seed, ordered=True) for seed in SEEDS)


def found_on_two(seed):
    """What is found where each device has the keys of the other one."""

    def body(q, k, v, bar, lse, delta):
        rows = (x.transpose(0, 2, 1) for x in (lse, delta))
        given = q, k, v, bar, *rows, Sequence()
        return attention_derivative.derive(*given, scale=0.1, team=Team.along("x"), distance=1)

    spec = P(None, "x")
    mapped = jax.shard_map(body, mesh=mesh_of(2), in_specs=spec, out_specs=spec)
    rows = [jax.numpy.zeros((1, 256, 2), "float32")] * 2
    operands = drawn((1, 256, 2, 64), (1, 256, 1, 64))
    try:
        # With cores to spare devices meet inside the kernel.
        with st.simulate(seed=seed, core_count=4, on_finding="record") as report:
            jax.block_until_ready(jax.jit(mapped)(*operands, *rows))
    except SimulationError as error:
        return error.report.kinds() | {"stopped"}
    return report.kinds()


def stored_too_early(monkeypatch):
    """Before the owner of the keys has started."""
    monkeypatch.setattr(Handshake, "wait", lambda self: self.observed and self.observed.signal())


def not_waited_for(monkeypatch):
    """The owner of the keys ends before their derivatives are in place."""
    monkeypatch.setattr(Moves, "finish", lambda self: self.refs.handed_over.wait(0))


def not_handed_over(monkeypatch):
    monkeypatch.setattr(Moves, "stored_keys", lambda self, team: None)


@pytest.mark.parametrize(
    "bug",
    [
        not_waited_for,
        pytest.param(stored_too_early, marks=SLOW),
        pytest.param(not_handed_over, marks=SLOW),
    ],
)
def test_derivatives_are_handed_to_the_owner_of_the_keys(monkeypatch, bug):
    bug(monkeypatch)
    assert any(found_on_two(seed) for seed in SEEDS)


@SLOW
def test_nothing_is_found_between_devices_without_a_bug():
    assert not any(found_on_two(seed) for seed in SEEDS)


def a_mask_off_by_one(monkeypatch):
    right = deriving._masked
    monkeypatch.setattr(
        deriving, "_masked", lambda parts, scores, ahead: right(parts, scores, ahead + 1)
    )


def a_block_is_passed_over(monkeypatch):
    """The last block of the table is replaced by the one before it."""
    right = attention_derivative.derivative_shares.table

    def wrong(seeing, order):
        found = right(seeing, order).copy()
        last = found[0, 0, 0]
        found[0, last, 0] = found[0, last - 1, 0]
        return found

    monkeypatch.setattr(attention_derivative.derivative_shares, "table", wrong)


def the_last_piece_is_lost(monkeypatch):
    right = deriving.Sums._replace

    def lost(memory, own, sums):
        original(memory, own, right(sums, begun=sums.begun & False))

    original = deriving._last_piece
    monkeypatch.setattr(deriving, "_last_piece", lost)


@pytest.mark.parametrize(
    "bug",
    [
        a_mask_off_by_one,
        pytest.param(a_block_is_passed_over, marks=SLOW),
        pytest.param(the_last_piece_is_lost, marks=SLOW),
    ],
)
def test_what_else_is_found(monkeypatch, bug):
    bug(monkeypatch)
    assert found_on_one(0)
