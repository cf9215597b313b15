"""How rows of a product are cut that a kernel stores in tiles, and then sums in pieces."""

from __future__ import annotations

from stretto.kernels.collectives.summing import Piece
from stretto.kernels.collectives.token_tables import MAX_COLUMNS, Row

STORED_COLUMNS = 64  # of a piece of a tile, in 16 bits
MOST_COLUMNS = 1024  # of a sum, eight registers of each thread
MAX_PARTS = 256  # of the copy engine


def cut(width: int) -> tuple[Row, Piece] | None:
    """How a row of the product is cut, and the piece that is summed at once; None if in no way.

    With the fewest columns that only fill up a warpgroup's registers, and then the smallest: it is
    ready the earliest.
    """
    found = []
    for columns in range(STORED_COLUMNS, MAX_COLUMNS + 1, STORED_COLUMNS):
        parts = width // columns
        for some in range(1, parts + 1):
            piece = Piece.of(some, columns, 2)
            if width % columns or parts % some or parts > MAX_PARTS:
                continue
            if piece.padded * columns <= MOST_COLUMNS:
                found.append((Row(parts, columns, parts), piece))
    least = lambda x: (x[1].padded / x[1].parts, x[1].padded * x[0].columns, x[0].parts)  # noqa: E731
    return min(found, key=least, default=None)
