"""How a table of tokens lies in memory, so that the copy engine takes chunks of it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from stretto.distributed import schedule
from stretto.distributed.schedule import Int, ceil_div

ALIGNED_COLUMNS = 4
"""Numbers of 4 bytes in a row that the copy engine takes."""
MOST_ROWS = 256
"""That the copy engine takes at once."""
ALIGNED_ROWS = 8
"""Of a chunk in shared memory, so that the next one begins where the copy engine writes."""


@dataclasses.dataclass(frozen=True)
class TableShape:
    """A table `[tokens, top_k]` of numbers of 4 bytes, read in chunks of so many tokens.

    | what fills rows of 16 bytes | lies as | padded by XLA |
    |---|---|---|
    | the numbers of a token | a row for each token | no |
    | those of a chunk | rows of 4 numbers, of one token or more | no |
    | neither | a row for each token | yes |

    Attributes:
      tokens: of a chunk.
    """

    tokens: int
    top_k: int

    @property
    def _is_dense(self) -> bool:
        """Whether a row may have numbers of several tokens."""
        numbers = self.tokens * self.top_k
        fits = numbers % ALIGNED_COLUMNS == 0 and numbers // ALIGNED_COLUMNS <= MOST_ROWS
        return self.top_k % ALIGNED_COLUMNS != 0 and fits

    @property
    def columns(self) -> int:
        """Of a row."""
        if self._is_dense:
            return ALIGNED_COLUMNS
        return ceil_div(self.top_k, ALIGNED_COLUMNS) * ALIGNED_COLUMNS

    def rows(self, tokens: Int) -> Int:
        """Of so many tokens, which fill them."""
        return schedule.div(tokens * self.top_k, ALIGNED_COLUMNS) if self._is_dense else tokens

    def place(self, token: Int, choice: int) -> tuple[Int, Int]:
        """(row, column) of a token's number."""
        if not self._is_dense:
            return token, choice
        number = token * self.top_k + choice
        row = schedule.div(number, ALIGNED_COLUMNS)
        return row, number - row * ALIGNED_COLUMNS

    @property
    def in_memory(self) -> tuple[int, int]:
        """(rows, columns) of a chunk in shared memory."""
        rows = int(self.rows(self.tokens))
        return ceil_div(rows, ALIGNED_ROWS) * ALIGNED_ROWS, self.columns

    @property
    def num_bytes(self) -> int:
        """Of a chunk in shared memory."""
        rows, columns = self.in_memory
        return 4 * rows * columns

    def of_table(self, table: jax.Array, fill: float) -> jax.Array:
        """The table in whole chunks, `[rows, columns]`."""
        tokens, top_k = table.shape
        more = -tokens % self.tokens
        columns = 0 if self._is_dense else self.columns - top_k
        if more or columns:
            table = jnp.pad(table, ((0, more), (0, columns)), constant_values=fill)
        return table.reshape(-1, self.columns)
