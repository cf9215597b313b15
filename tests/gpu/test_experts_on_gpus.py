"""Tokens to their experts and back, on GPUs: by each configuration; and derivatives."""

from __future__ import annotations

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import BF16, F32
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.kernels.collectives import combine, dispatch
from stretto.kernels.operations import mixture_rules

CONFIGS = {
    "chunks": dict(chunk=2),
    "tables": dict(tables=True),
    "flat": dict(flat=True),
}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_few_tokens(name, mesh, scale, tally) -> None:
    """Several calls with other routings, each as XLA's: rows, tables, and sums of whole numbers."""
    tokens, width, experts = (6, 64, 8) if scale.rehearsed else (64, 2048, 128)
    given = CONFIGS[name]
    sums = {key: value for key, value in given.items() if key != "tables"}

    def there_and_back(x, index, weights, backend, configs):
        to, back = configs
        rows, routing = st.expert_dispatch(
            x, index, "x", num_experts=experts, backend=backend, config=to
        )
        out = st.expert_combine(rows, weights, routing.positions, "x", backend=backend, config=back)
        used = jnp.arange(len(rows)) < jnp.sum(routing.group_sizes)
        scalars = routing.dropped[None], routing.out_of_range[None]
        tables = (*routing[:3], *scalars)
        return jnp.where(used[:, None], rows.astype(F32), 0), out, tables

    def program(backend, configs):
        body = lambda *xs: there_and_back(*xs, backend, configs)  # noqa: E731
        specs = dict(in_specs=(P("x"),) * 3, out_specs=P("x"), check_vma=False)
        return jax.jit(jax.shard_map(body, mesh=mesh, **specs))

    x = jnp.asarray(cases.whole_numbers(0, mesh.size * tokens, width), BF16)
    weights = jnp.ones((mesh.size * tokens, 4), F32)
    ours = program(scale.backend, (dispatch.Config(**given), combine.Config(**sums)))
    theirs = program("xla", (None, None))
    for seed in range(1 if scale.rehearsed else 3):
        index = jax.random.randint(jax.random.key(seed), (mesh.size * tokens, 4), -2, experts + 2)
        found, wanted = (jax.tree.map(np.asarray, f(x, index, weights)) for f in (ours, theirs))
        tally.checks(1)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


MANY = {
    "tables of many": (dict(counted=True, num_blocks=124), {}),
    "stores of several tokens": (dict(stores=8), dict(warpgroups=2)),
    "totals": ({}, dict(totals=True, warpgroups=2, chunk=8)),
    "totals by four warpgroups": ({}, dict(totals=True, warpgroups=4, chunk=8)),
}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", MANY)
def test_many_tokens(name, mesh, scale, tally) -> None:
    """A dispatch and a combine, as XLA's; one of several routings leaves a device out."""
    tokens, width, experts = (40, 1024, 8) if scale.rehearsed else (1200, 2048, 128)
    to, back = MANY[name]

    def there_and_back(x, index, weights, backend, configs):
        to, back = configs
        how = dict(backend=backend)
        rows, routing = st.expert_dispatch(x, index, "x", num_experts=experts, config=to, **how)
        out = st.expert_combine(rows, weights, routing.positions, "x", config=back, **how)
        used = jnp.arange(len(rows)) < jnp.sum(routing.group_sizes)
        return jnp.where(used[:, None], rows, 0), out, routing[:3]

    def program(backend, configs):
        body = lambda *xs: there_and_back(*xs, backend, configs)  # noqa: E731
        specs = dict(in_specs=(P("x"),) * 3, out_specs=P("x"), check_vma=False)
        return jax.jit(jax.shard_map(body, mesh=mesh, **specs))

    x = jnp.asarray(cases.whole_numbers(0, mesh.size * tokens, width), BF16)
    weights = jnp.ones((mesh.size * tokens, 8), F32)
    ours = program(scale.backend, (dispatch.Config(**to), combine.Config(**back)))
    theirs = program("xla", (None, None))
    for seed, first in enumerate([-2] if scale.rehearsed else [-2, 0, experts // 2]):
        key, shape = jax.random.key(seed), (mesh.size * tokens, 8)
        index = jax.random.randint(key, shape, first, experts + 2)
        found, wanted = (jax.tree.map(np.asarray, f(x, index, weights)) for f in (ours, theirs))
        tally.checks(1)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "given",
    [
        dict(unused_rows_of_derivatives=False),
        dict(unused_rows_of_derivatives=False, combine=combine.Config(warpgroups=2)),
    ],
)
def test_gradients_without_unused_rows(given, mesh, scale, tally) -> None:
    """The same bits as with zeros in rows of no expert."""
    tokens, d, f, experts = (6, 128, 64, 8) if scale.rehearsed else (512, 1024, 512, 16)

    def gradients(config):
        def body(x, index, weights, w_in, w_out):
            def loss(*xs):
                x, weights, w_in, w_out = xs
                how = dict(config=config, backend=scale.backend)
                out, _ = st.mixture_of_experts(x, index, weights, w_in, w_out, "x", **how)
                return jnp.sum(out.astype(F32) ** 2)

            return jax.grad(loss, (0, 1, 2, 3))(x, weights, w_in, w_out)

        specs = dict(in_specs=(P("x"),) * 5, out_specs=P("x"), check_vma=False)
        return jax.jit(jax.shard_map(body, mesh=mesh, **specs))

    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [
        (mesh.size * tokens, d),
        (mesh.size * tokens, 2),
        (experts, d, 2 * f),
        (experts, f, d),
    ]
    x, weights, w_in, w_out = (
        jax.random.normal(key, shape) / 8 for key, shape in zip(keys[1:], shapes, strict=True)
    )
    index = jax.random.randint(keys[0], (mesh.size * tokens, 2), 0, experts)
    operands = x.astype(BF16), index, weights.astype(F32), w_in.astype(BF16), w_out.astype(BF16)
    found, wanted = (
        jax.tree.map(np.asarray, gradients(config)(*operands))
        for config in (mixture_rules.Config(**given), mixture_rules.Config())
    )
    tally.checks(1)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
