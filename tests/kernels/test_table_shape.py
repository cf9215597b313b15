"""How tables of tokens lie in memory, for the copy engine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stretto.kernels.collectives.table_shape import TableShape


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6, 8])
def test_a_chunk_has_the_numbers_of_its_tokens(chunk, top_k):
    """They start where the copy engine can, and fill rows of 16 bytes."""
    tokens, shape = 2 * chunk + 1, TableShape(chunk, top_k)
    table = np.arange(tokens * top_k, dtype=np.int32).reshape(tokens, top_k)
    found = np.asarray(shape.of_table(jnp.asarray(table), -1))
    rows, columns = shape.in_memory
    assert columns % 4 == 0 and rows % 8 == 0 and rows >= shape.rows(chunk)
    assert len(found) == shape.rows(3 * chunk)
    for token in range(tokens):
        first = token // chunk * chunk
        of_chunk = found[shape.rows(first) :][: shape.rows(chunk)]
        for choice in range(top_k):
            row, column = (int(x) for x in shape.place(jnp.int32(token - first), choice))
            assert of_chunk[row, column] == table[token, choice]


@pytest.mark.parametrize(
    ("chunk", "top_k", "padded"),
    [(8, 8, 0), (8, 2, 0), (2, 2, 0), (8, 3, 0), (1, 2, 1), (256, 6, 1)],
)
def test_what_is_padded(chunk, top_k, padded):
    """Only what fills no rows, or more than the copy engine takes at once."""
    table = jax.ShapeDtypeStruct((2 * chunk, top_k), jnp.int32)
    made = jax.make_jaxpr(lambda x: TableShape(chunk, top_k).of_table(x, -1))(table)
    assert str(made).count("pad[") == padded
