"""Operations over axes that span nodes: the numbers of one large team, and what serves them.

One process's CPU devices stand for nodes; jobs of several processes are in `tests/cluster`.
"""

from __future__ import annotations

import compiling
import fused_cases as cases
import gradient_checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import verification
from collective_checks import drawn, per_device, same_bits
from jax.sharding import PartitionSpec as P
from selection import slow
from subjects import HIERARCHICAL, SUBJECTS
from verification import Problem

import stretto as st
from stretto.distributed import settings
from stretto.distributed.errors import BackendUnavailableError
from stretto.kernels.collectives import exchange
from stretto.kernels.fused import all_gather_matmul as all_gather_matmul_kernel
from stretto.kernels.nodes import nodes
from stretto.kernels.problem.node_config import Config

BOTH = ("x", "y")
everywhere = pytest.mark.parametrize("name", HIERARCHICAL)
SUMS = ("reduce_scatter", "all_reduce", "matmul_all_reduce")
# The derivative of a gather is a sum, and the other way round.
gradients_of = pytest.mark.parametrize(
    "name", [slow(name) if name in SUMS else name for name in HIERARCHICAL]
)
# A gather and a sum of each kind; the others go by the same code, and by `TestPieces` and
# `test_gradients`, which all of them have.
mostly = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name in ("all_gather", "matmul_all_reduce") else pytest.mark.slow
        )
        for name in HIERARCHICAL
    ],
)


@pytest.fixture
def simulation():
    # The kernels' own races are looked for elsewhere.
    with st.simulate(seed=2, core_count=1, detect_races=False) as report:
        yield report
    assert report.ok, str(report)


def verify(name, shape, *sizes, per_node=None, axis=BOTH, **options):
    """What is wrong with an operation on a mesh of `shape`, nodes along its first axes."""
    mesh = cases.mesh_of(*shape, axes=("x", "y", "z"))
    subject = SUBJECTS[name]
    devices = int(np.prod([mesh.shape[a] for a in axis]))
    problem = Problem(subject, subject.sizes_of(devices, *sizes), options, axis)
    with settings.nodes_of(per_node or shape[-1]):
        (outcome,) = verification.verify(mesh, [problem])
    # A sum is rounded once a node, and once in the end; XLA's sums on a CPU only in the end.
    roundings = 1 + devices / (per_node or shape[-1])
    flaws = [flaw for flaw in outcome.flaws if "error" not in flaw]
    return flaws + [f"{r} x XLA's error" for r in outcome.ratios if r > roundings]


class TestNumbers:
    """Exact on whole numbers, good on others, the same bits where all hold the same."""

    @mostly
    def test_two_nodes(self, name, simulation):
        assert verify(name, (2, 2), 9, 8, 24) == []
        # Two nodes are a piece for the other and one for the own, or a scatter and a gather.
        assert simulation.launches == 2 * 2

    @pytest.mark.parametrize(
        ("name", "per_node"),
        [("reduce_scatter", 3), slow("all_gather", 4)],
    )
    def test_two_larger_nodes(self, name, per_node, simulation):
        assert verify(name, (2, per_node), 9, 8, 24) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("per_node", [3, 4])
    @everywhere
    def test_all_on_two_larger_nodes(self, name, per_node, simulation):
        assert verify(name, (2, per_node), 9, 8, 24) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "all_gather"])
    def test_three_nodes(self, name, simulation):
        """What goes to the next node and what goes to the one after are not mixed up."""
        assert verify(name, (3, 2), 9, 8, 24) == []
        assert simulation.launches == 2 * 3

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
    def test_nodes_along_two_axes(self, name, simulation):
        assert verify(name, (2, 2, 2), 9, 8, 24, axis=("x", "y", "z")) == []
        assert simulation.launches == 2 * 4

    def test_teams_beside_each_other(self, simulation):
        """Along the first and the last axis: two teams, each with a device pair on two nodes."""
        assert verify("all_gather", (2, 2, 2), 9, 8, 24, axis=("x", "z"), per_node=4) == []


@pytest.mark.parametrize("dtype", ["bool", "int4", "complex64"])
def test_a_gather_of_any_type(dtype, simulation):
    x = drawn((4, 3, 5), dtype)
    with settings.nodes_of(2):
        out = per_device(lambda x: st.all_gather(x, BOTH), x, mesh=cases.mesh_of(2, 2), axis=BOTH)
    for got in out:
        same_bits(got, x.reshape(-1, 5))
    assert simulation.launches == 2


class TestSeveralMatrices:
    def run(self, body, *shapes):
        operands = [cases.whole_numbers(i, *shape) for i, shape in enumerate(shapes)]
        mesh = cases.mesh_of(2, 2)
        program = jax.shard_map(
            body, mesh=mesh, in_specs=P(None), out_specs=P(BOTH), check_vma=False
        )
        with settings.nodes_of(2):
            return operands, jax.jit(program)(*(x.astype(jnp.bfloat16) for x in operands))

    def test_several_right_hand_sides_and_the_gathered_lhs(self, simulation):
        def body(lhs, one, other):
            shard = lhs[9 * jax.lax.axis_index(BOTH) + jnp.arange(9)]
            outs, gathered = st.all_gather_matmul(
                shard, (one, other), BOTH, rhs_transposed=True, return_gathered=True
            )
            return *outs, gathered

        (lhs, *rhs), outs = self.run(body, (36, 8), (24, 8), (40, 8))
        for want, out in zip([*(lhs @ x.T for x in rhs), lhs], outs, strict=True):
            np.testing.assert_array_equal(np.asarray(out, np.float32), np.tile(want, (4, 1)))
        assert simulation.launches == 2

    @pytest.mark.parametrize("everywhere", [slow(False), True])
    def test_pairs_whose_products_are_added_up(self, everywhere, simulation):
        def body(*operands):
            call = st.matmul_all_reduce if everywhere else st.matmul_reduce_scatter
            return call(operands[:2], operands[2:], BOTH)

        (a, b, c, d), out = self.run(body, (36, 8), (36, 16), (8, 24), (16, 24))
        want = np.tile(4 * (a @ c + b @ d), (4 if everywhere else 1, 1))
        np.testing.assert_array_equal(np.asarray(out, np.float32), want)


class TestPieces:
    """What crosses between nodes in several pieces comes together again."""

    @pytest.mark.parametrize(
        ("name", "launches"),
        [("all_gather_matmul", 3), slow("matmul_reduce_scatter", 3), slow("matmul_all_reduce", 4)],
    )
    def test_matmuls(self, name, launches, simulation):
        """Of unequal sizes: 64 rows and 1, or of all rows 192 and 68."""
        assert verify(name, (2, 2), 65, 8, 24, config=Config(pieces=2)) == []
        assert simulation.launches == 2 * launches

    @pytest.mark.parametrize(
        ("name", "launches"), [slow("all_gather", 3), ("reduce_scatter", 3), slow("all_reduce", 4)]
    )
    def test_collectives(self, name, launches, simulation):
        assert verify(name, (2, 2), 20, 0, 1027, config=Config(pieces=2)) == []
        assert simulation.launches == 2 * launches

    @pytest.mark.slow
    def test_the_kernels_own_configuration(self, simulation):
        config = Config(kernel=exchange.Config(slots=3))
        assert verify("all_gather", (2, 2), 9, 8, 24, config=config) == []
        assert verify("all_gather", (2, 2), 9, 8, 24, config=exchange.Config(slots=3)) == []

    def test_on_one_node_the_kernels_own_counts(self, simulation):
        config = Config(pieces=3, kernel=exchange.Config(slots=3))
        assert verify("all_gather", (2, 2), 9, 8, 24, per_node=4, config=config) == []
        assert simulation.launches == 2

    @pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
    @pytest.mark.parametrize("count", [1, 2, 3, 7])
    def test_pieces_follow_one_another(self, size, count):
        pieces = nodes.pieces_of(size, count)
        assert [first for first, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
        assert pieces[-1][1] == size and len(pieces) <= count
        assert all((end - first) % 64 == 0 for first, end in pieces[:-1])

    def test_how_many(self):
        assert [nodes.most_pieces(n, 2048) for n in (1, 4095, 4096, 10**6)] == [1, 1, 2, 4]
        assert nodes.most_pieces(1, 2048, asked=7) == 7
        with pytest.raises(ValueError, match="pieces=0 must be at least 1"):
            Config(pieces=0)


class TestDerivatives:
    @gradients_of
    def test_gradients(self, name, simulation):
        sizes = SUBJECTS[name].sizes_of(4, 9, 8, 24)
        mesh = cases.mesh_of(2, 2)
        with settings.nodes_of(2):
            program = gradient_checks.gradients(name, mesh, sizes, axis=BOTH, backend="simulator")
            errors = compiling.run(compiling.compile_one(program, compiling.scalar(3)), 3)
        ours, xla = errors[:, 0], errors[:, 1]
        assert (ours <= 2 * xla + 1e-6).all() and ours.max() < 0.05

    @mostly
    def test_types_of_values(self, name, simulation):
        """With `check_vma`, results vary as those of one large team do, and so do gradients."""
        subject = SUBJECTS[name]
        shapes = subject.shapes(4, subject.sizes_of(4, 9, 8, 24))

        def body(scale):
            operands = [jnp.ones(shape, jnp.bfloat16) * scale for shape in shapes]
            loss = lambda *xs: jnp.sum(subject.call(xs, BOTH).astype(jnp.float32))  # noqa: E731
            varies = jax.typeof(subject.call(operands, BOTH)).manual_axis_type.varying
            assert varies == (set() if "all_reduce" in name else set(BOTH))
            return [jax.lax.psum(g, BOTH) for g in jax.grad(loss)(*operands)]

        program = jax.shard_map(body, mesh=cases.mesh_of(2, 2), in_specs=P(), out_specs=P())
        with settings.nodes_of(2):
            jax.block_until_ready(jax.jit(program)(jnp.bfloat16(1)))


class TestChoice:
    def explained(self, operation, *operands, shape=(2, 2), per_node=2, **options):
        found = []

        def body(x):
            found.append(st.explain(operation, *operands, **options))
            return x

        program = jax.shard_map(
            body, mesh=cases.mesh_of(*shape), in_specs=P(), out_specs=P(), check_vma=False
        )
        with settings.nodes_of(per_node):
            jax.jit(program).lower(np.zeros(1, np.float32))
        return found[0]

    X = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)

    def test_the_part_within_a_node_decides(self):
        choice = self.explained(st.all_gather_matmul, self.X, self.X, BOTH)
        assert choice.backend == "xla" and choice.split is None
        assert str(choice) == (
            "all_gather_matmul 2048x512x2048 bfloat16 on 4 x cpu: xla, because axis 'x' joins"
            " nodes, and for the part within each, all_gather_matmul 1024x512x1024 bfloat16 on 2 x"
            " cpu, the devices are cpu, not GPUs."
        )

    def test_in_a_simulation(self, simulation):
        choice = self.explained(st.matmul_reduce_scatter, self.X, self.X, BOTH)
        assert choice.backend == "simulator"
        assert (choice.split.outer, choice.split.inner) == (("x",), ("y",))
        assert "matmul_reduce_scatter 256x1024x512 bfloat16 on 2 x cpu" in choice.reason

    def test_a_team_within_a_node(self, simulation):
        choice = self.explained(st.all_gather, self.X, "y")
        assert choice.backend == "simulator" and choice.split is None

    @pytest.mark.parametrize(
        ("operation", "axis", "options"),
        [
            (st.all_gather, "x", {}),
            (st.all_gather, ("y", "x"), {}),
            (st.all_to_all, BOTH, dict(split_axis=0, concat_axis=0)),
        ],
    )
    def test_what_has_no_part_within_a_node(self, operation, axis, options, simulation):
        """Is XLA's, and an error where a kernel was asked for, before anything is launched."""
        choice = self.explained(operation, self.X, axis, **options)
        pair = r"joins device 0 \(process 0, node 0\) and device \d \(process 0, node 1\)"
        assert choice.backend == "xla" and "NVLink joins devices of one node only" in choice.reason
        with pytest.raises(BackendUnavailableError, match=pair):
            self.explained(operation, self.X, axis, backend="pallas", **options)
        assert simulation.launches == 0

    def test_one_device_a_node(self):
        choice = self.explained(st.all_gather, self.X, BOTH, shape=(2, 1), per_node=1)
        assert choice.backend == "xla"

    def test_a_config_that_does_not_fit(self, simulation):
        kernel = all_gather_matmul_kernel.Config(pull_rows=512)
        with pytest.raises(ValueError, match="a piece of 512 x 256 is too large"):
            self.explained(st.all_gather_matmul, self.X, self.X, BOTH, config=Config(kernel=kernel))

    @mostly
    def test_by_xla(self, name):
        assert verify(name, (2, 2), 9, 8, 24) == []


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_a_move_to_the_wrong_node_is_found(direction, simulation, monkeypatch):
    right = nodes.Nodes.move
    monkeypatch.setattr(nodes.Nodes, "move", lambda self, x, shift: right(self, x, shift + 1))
    assert verify("all_gather" if direction == "gather" else "reduce_scatter", (3, 2), 9, 8, 24)
