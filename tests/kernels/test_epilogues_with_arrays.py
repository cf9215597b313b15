"""Epilogues with arrays, and of two products: by the kernel where it can, else by XLA after it."""

from __future__ import annotations

import dataclasses
import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.simulator import DeadlockError
from stretto.kernels.choice import choose
from stretto.kernels.engine.hopper import applying
from stretto.kernels.engine.hopper.tile_config import NARROW, NARROWEST, TileConfig
from stretto.kernels.fused import beside
from stretto.kernels.fused.all_gather_matmul import Config
from stretto.kernels.operations import epilogues
from stretto.kernels.problem.epilogue import Form
from stretto.kernels.problem.options import GatherOptions

BF16, F32 = jnp.bfloat16, jnp.float32
ROWS, COLUMNS, EVERYWHERE = P("x"), P(None, "x"), P()
M, K, N = 130, 72, 2 * 136  # Whole: no shard fills a tile.
FEW_BUFFERS = Config(tiles=TileConfig(store_buffers=2))
RELU_GATE = functools.partial(epilogues.gated, jax.nn.relu)


def draw(seed: int, *shape: int, dtype=BF16) -> jax.Array:
    return jnp.asarray(cases.whole_numbers(seed, *shape), dtype)


ROW, COLUMN = (draw(11, N, dtype=F32), ROWS), (draw(12, M, 1, dtype=F32), EVERYWHERE)
MATRIX = (draw(13, M, N), COLUMNS)
KEEP = (draw(14, M, N) > 0, COLUMNS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is made of (arrays), which lie as they say; `sides` are right-hand sides."""

    make: object
    arrays: tuple = ()
    sides: int = 1
    options: dict = dataclasses.field(default_factory=dict)

    def operands(self):
        transposed = self.options.get("rhs_transposed", False)
        rhs = [draw(i + 1, *((N, K) if transposed else (K, N))) for i in range(self.sides)]
        return [draw(0, M, K), *rhs, *(x for x, _ in self.arrays)]

    def specs(self):
        rhs = ROWS if self.options.get("rhs_transposed") else COLUMNS
        lhs = COLUMNS if self.options.get("gather_axis") == "k" else ROWS
        return (lhs, *[rhs] * self.sides, *(spec for _, spec in self.arrays))

    def program(self, backend):
        options = dict(self.options)
        if backend == "xla":
            options.pop("config", None)

        def body(lhs, *rest):
            rhs, arrays = rest[: self.sides], rest[self.sides :]
            rhs = rhs[0] if self.sides == 1 else rhs
            epilogue = self.make(*arrays)
            return st.all_gather_matmul(
                lhs, rhs, "x", epilogue=epilogue, backend=backend, **options
            )

        return jax.jit(
            jax.shard_map(
                body,
                mesh=cases.mesh_of(2),
                in_specs=self.specs(),
                out_specs=COLUMNS,
                check_vma=False,
            )
        )


CASES = {
    "columns, rows and a matrix through few buffers": Case(
        make=lambda b, s, r: epilogues.chain(
            epilogues.scale(s), epilogues.bias(b), "relu", epilogues.residual(r)
        ),
        arrays=(ROW, COLUMN, MATRIX),
        options=dict(config=FEW_BUFFERS),
    ),
    "two products, a bias of one and a residual": Case(
        make=lambda b, r: epilogues.chain(RELU_GATE(None, b), epilogues.residual(r)),
        arrays=(ROW, MATRIX),
        sides=2,
        options=dict(config=Config()),
    ),
    "a mask, gathered first": Case(
        make=lambda s, keep: epilogues.chain(epilogues.scale(s), epilogues.mask(keep)),
        arrays=(COLUMN, KEEP),
        options=dict(config=Config(gather_first=True, tiles=NARROW)),
    ),
    "a bias for each of two results": Case(
        make=lambda a, b: epilogues.bias((a, b)),
        arrays=(ROW, (draw(15, N, dtype=F32), ROWS)),
        sides=2,
        options=dict(config=Config(tiles=NARROW)),
    ),
    "two products of transposed sides, float32": Case(
        make=lambda: RELU_GATE(),
        sides=2,
        options=dict(config=Config(tiles=NARROW), rhs_transposed=True, out_dtype=F32),
    ),
    "gathered along the contraction": Case(
        make=lambda b, r: epilogues.chain(epilogues.bias(b), epilogues.residual(r)),
        arrays=(ROW, MATRIX),
        options=dict(gather_axis="k"),
    ),
    "a number": Case(make=epilogues.scale, arrays=((jnp.float32(3), EVERYWHERE),)),
}
QUICK = list(CASES)[:2]


def both(case: Case, **settings):
    """Results through XLA and of the kernel in the simulator, and what the latter's choice says."""
    expected = case.program("xla")(*case.operands())
    settings = dict(seed=2, core_count=1) | settings  # A block makes several tiles.
    with choose.recorded() as choices, st.simulate(**settings) as report:
        found = case.program("simulator")(*case.operands())
        found = jax.tree.map(lambda x: np.asarray(x, np.float32), found)
    return found, jax.tree.map(lambda x: np.asarray(x, np.float32), expected), choices, report


@pytest.fixture(autouse=True)
def fresh():
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    "label", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
def test_kernel_applies_it_to_the_product_in_registers(label):
    """Whole numbers: what is rounded once is exact, and what was rounded before is not."""
    found, expected, choices, _ = both(CASES[label])
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert "the kernel applies the epilogue" in str(choices[0])


def leave_out(monkeypatch, name: str) -> None:
    monkeypatch.setattr(applying.Applying, name, lambda *_: None)


def what_is_found() -> str:
    """What the simulator says of the first case, whether or not the kernel ends."""
    try:
        _, _, _, report = both(CASES[QUICK[0]], on_finding="record")
    except Exception as error:
        return str(error)
    return str(report)


@pytest.mark.slow
def test_vectors_are_waited_for(monkeypatch):
    leave_out(monkeypatch, "begin")
    assert "race on beside_0" in what_is_found()


@pytest.mark.slow
def test_a_buffer_is_not_written_before_the_matrix_is_in_it(monkeypatch):
    leave_out(monkeypatch, "wait_for_buffer")
    assert "race on out_smem" in what_is_found()


@pytest.mark.slow
def test_vectors_are_not_overwritten_while_they_are_read(monkeypatch):
    leave_out(monkeypatch, "end")
    with pytest.raises(DeadlockError, match="beside_empty"):
        both(CASES[QUICK[0]])


def derivatives(backend: str):
    case = CASES["two products, a bias of one and a residual"]
    case = dataclasses.replace(case, options={})
    program = case.program(backend)

    def loss(*xs):
        return (program(*xs).astype(F32) * jnp.arange(N)).sum()

    operands = case.operands()
    return jax.grad(loss, tuple(range(len(operands))))(*operands)


@pytest.mark.slow
def test_derivatives_of_operands_and_arrays():
    expected = derivatives("xla")
    with st.simulate(seed=2, core_count=2):
        found = jax.tree.map(np.asarray, derivatives("simulator"))
    for x, y in zip(found, expected, strict=True):
        y = np.asarray(y, np.float32)
        np.testing.assert_allclose(x.astype(np.float32), y, rtol=0.02, atol=0.01 * np.abs(y).max())


# --- What is left to XLA. -------------------------------------------------------------------------


def why(config: Config, out=BF16, *, gated: bool = False, **arrays) -> str | None:
    options = GatherOptions(out_dtype=jnp.dtype(out), epilogue=Form(jax.nn.relu, gated))
    return beside.obstacle(config, options, list(arrays.items()))


def test_what_the_kernel_leaves_to_xla():
    assert why(Config(), columns=F32, rows=F32, elements=BF16) is None
    assert why(Config(), F32, elements=BF16) is None
    assert why(Config(), elements=jnp.bool_) is None
    assert why(Config(), gated=True) is None
    assert why(Config(unfused=True), gated=True) is None
    assert "float16 array as large as the bfloat16" in str(why(Config(), elements=jnp.float16))
    assert "holds no pair" in str(why(Config(tiles=NARROWEST), gated=True))
    too_many = dataclasses.replace(Config(), pull_slots=3)
    assert "do not fit into shared memory" in str(why(too_many, columns=F32))


SCATTER = (st.matmul_reduce_scatter, (COLUMNS, ROWS), 8)
REDUCE = (st.matmul_all_reduce, (COLUMNS, ROWS), 8)
GATHER = (functools.partial(st.all_gather_matmul, config=Config()), (ROWS, COLUMNS), 16)


@pytest.mark.parametrize(
    ("called", "said"),
    [
        (SCATTER, "XLA applies the epilogue to the kernel's product, since it follows a sum"),
        (REDUCE, "XLA applies the epilogue to the kernel's product, since it follows a sum"),
        (GATHER, "the kernel applies the epilogue to the product in registers"),
    ],
)
def test_explain_says_who_applies_it(called, said):
    call, specs, n = called
    found = []

    def body(x, w):
        for epilogue in (epilogues.bias(jnp.ones(8)), jax.nn.relu):
            found.append(st.explain(call, x, w, "x", epilogue=epilogue, backend="simulator"))
        return x

    mapped = jax.shard_map(body, mesh=cases.mesh_of(2), in_specs=specs, out_specs=specs[0])
    jax.eval_shape(mapped, draw(0, 16, 16), draw(1, 16, n))
    assert said in found[0].reason
    # Of a function alone it is said where the kernel does not apply it.
    assert (said in found[1].reason) == (called is not GATHER)
