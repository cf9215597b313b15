"""Few tokens to their experts and back, on GPUs: by small chunks, by the kernel with tables."""

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

CONFIGS = {
    "chunks": dict(chunk=2),
    "tables": dict(tables=True),
    "flat": dict(flat=True),
}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_few_tokens(name, scale, tally) -> None:
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
        return jax.jit(jax.shard_map(body, mesh=cases.mesh_of(2), **specs))

    x = jnp.asarray(cases.whole_numbers(0, 2 * tokens, width), BF16)
    weights = jnp.ones((2 * tokens, 4), F32)
    ours = program(scale.backend, (dispatch.Config(**given), combine.Config(**sums)))
    theirs = program("xla", (None, None))
    for seed in range(1 if scale.rehearsed else 3):
        index = jax.random.randint(jax.random.key(seed), (2 * tokens, 4), -2, experts + 2)
        found, wanted = (jax.tree.map(np.asarray, f(x, index, weights)) for f in (ours, theirs))
        tally.checks(1)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
