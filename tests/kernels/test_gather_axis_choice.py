"""Which implementation serves an all-gather matmul along another dimension, and what is refused."""

from __future__ import annotations

import dataclasses
import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import pytest
import subjects
from fused_cases import BF16
from jax.sharding import PartitionSpec as P
from problems import choose, entry, problem

import stretto as st
from stretto.distributed import settings
from stretto.kernels.choice import tables
from stretto.kernels.fused import all_gather_matmul_k

everywhere = pytest.mark.parametrize("name", cases.GATHERS)


@everywhere
def test_explain(name):
    found = []
    sizes = cases.whole(name, 2, 128, 128, 128)
    lhs, rhs = (jax.ShapeDtypeStruct(s, BF16) for s in subjects.blocks(name, 2, sizes))

    def call(x):
        found.append(st.explain(cases.GATHERS[name], lhs, rhs, "x", backend="simulator"))
        return x

    jax.eval_shape(
        jax.shard_map(call, mesh=cases.mesh_of(2), in_specs=P(), out_specs=P()), jnp.zeros(2)
    )
    assert found[0].problem.operation == name
    size = "x".join(map(str, sizes))
    assert str(found[0]).startswith(f"{name} {size} bfloat16 on 2 x cpu: simulator")


class TestChoice:
    """`auto`, by what is known of the problem."""

    def choice(self, name, m, k, n, backend="auto"):
        return choose(problem(m, k, n, operation=name), backend)

    @pytest.mark.parametrize("name", ["all_gather_matmul_k", "all_gather_matmul_n"])
    def test_by_estimate_alone(self, monkeypatch, name):
        monkeypatch.setattr(tables, "table_for", tables.Table)
        large, small = self.choice(name, 16384, 8192, 8192), self.choice(name, 64, 64, 64)
        assert (large.backend, small.backend) == ("pallas", "xla")

    def test_the_transposed_problems_entry_and_the_transposes(self, monkeypatch):
        measured = entry(2048, 8192, 32768, fused_us=1000.0, xla_us=1100.0, config={"pull_rows": 8})
        monkeypatch.setattr(tables, "table_for", lambda kind: tables.Table(kind, (measured,)))
        choice = self.choice("all_gather_matmul_n", 32768, 8192, 2048)
        assert choice.backend == "pallas" and choice.xla_us == 1100
        assert 1000 < choice.fused_us < 1010  # The own shard of rhs.
        assert choice.config.pull_rows == 8
        slower = dataclasses.replace(measured, xla_us=1001.0)
        monkeypatch.setattr(tables, "table_for", lambda kind: tables.Table(kind, (slower,)))
        assert self.choice("all_gather_matmul_n", 32768, 8192, 2048).backend == "xla"
        # An entry of the same sizes, but of the other operation, says nothing.
        assert self.choice("all_gather_matmul_n", 2048, 8192, 32768).xla_us != 1010

    def test_beside_a_distant_entry_the_default_is_that_of_the_own_sizes(self, monkeypatch):
        measured = entry(208, 3480, 30800, fused_us=100.0, xla_us=200.0)
        monkeypatch.setattr(tables, "table_for", lambda kind: tables.Table(kind, (measured,)))
        choice = self.choice("all_gather_matmul_n", 6160, 3480, 208)
        assert choice.config == choice.kernel.default(choice.problem)
        assert choice.config.gather_first


class TestErrors:
    def fails(self, message, lhs, rhs, **options):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(
                jax.shard_map(
                    lambda x, y: st.all_gather_matmul(x, y, "x", **options),
                    mesh=cases.mesh_of(2),
                    in_specs=P(),
                    out_specs=P(),
                    check_vma=False,
                ),
                *jax.tree.map(lambda shape: jnp.zeros(shape, BF16), (lhs, rhs), is_leaf=is_shape),
            )

    def test_an_unknown_axis(self):
        self.fails("gather_axis='rows' is not one of 'm'", (8, 8), (8, 8), gather_axis="rows")

    def test_several_that_are_gathered(self):
        message = r"gather_axis='n' gathers rhs and takes one matrix, not a tuple of 2"
        self.fails(message, (8, 8), ((8, 8), (8, 8)), gather_axis="n")

    def test_sizes(self):
        message = r"lhs \(8, 16\) has k=16 columns and rhs \(8, 8\) has k=8 rows"
        self.fails(message, (8, 16), (8, 8), gather_axis="n")
        message = r"k=16 columns on each of 2 devices, 32 in all, and rhs \(16, 8\) has k=16 rows"
        self.fails(message, (8, 16), (16, 8), gather_axis="k")

    def test_a_config_that_cannot_be_built(self):
        for options, message in [
            (dict(pull_rows=12), "pull_rows=12 must divide tile_m=128"),
            (dict(pull_columns=512), "16 x 512 is too large"),
            (dict(pull_slots=20), "bytes of shared memory"),
        ]:
            config = all_gather_matmul_k.Config(**options)
            options = dict(gather_axis="k", config=config, backend="simulator")
            self.fails(message, (8, 8), (16, 8), **options)

    def test_several_nodes(self):
        """XLA serves, and a kernel that is asked for is refused."""
        call = functools.partial(self.across_nodes, jax.ShapeDtypeStruct((64, 64), BF16))
        for axis, k in (("k", 256), ("n", 64)):
            rhs = jax.ShapeDtypeStruct((k, 64), BF16)
            choice = call(rhs, axis, "auto")
            assert choice.backend == "xla" and "of one node only" in choice.reason
            with pytest.raises(ValueError, match=r"cannot serve this call: .* of one node only"):
                call(rhs, axis, "pallas")

    def across_nodes(self, lhs, rhs, axis, backend):
        found = []
        both = ("x", "y")

        def call(x):
            options = dict(gather_axis=axis, backend=backend)
            found.append(st.explain(st.all_gather_matmul, lhs, rhs, both, **options))
            return x

        mesh = cases.mesh_of(2, 2)
        with settings.nodes_of(2):
            jax.eval_shape(
                jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P()), jnp.zeros(2)
            )
        return found[0]


def is_shape(x) -> bool:
    return isinstance(x, tuple) and all(isinstance(size, int) for size in x)
