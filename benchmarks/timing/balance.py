"""Orders of turns in which everybody follows everybody equally often.

What was run before leaves its mark on what is run next: clocks, caches, memory. The orders are the
rows of Williams' designs (E. J. Williams, "Experimental designs balanced for the estimation of
residual effects of treatments", Aust. J. Sci. Res. A 2, 1949): for an even number of places as many
orders, for an odd one twice as many. In a whole design each place comes equally often at each turn,
and follows each other place equally often.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence


def design(count: int) -> list[list[int]]:
    """The orders of `count` places in which all is balanced: `count` of them, or twice as many.

    Neighbours in the first order differ by all numbers but 0, modulo `count`: it goes 0, 1, -1, 2,
    -2 and so on. The others are the first one, shifted. Of an odd number each difference comes
    twice and its opposite not at all, so that the reversed orders are needed besides.
    """
    zigzag = [((place + 1) // 2 * (-1) ** (place + 1)) % count for place in range(count)]
    shifted = [[(place + shift) % count for place in zigzag] for shift in range(count)]
    return shifted if count % 2 == 0 else shifted + [order[::-1] for order in shifted]


def orders(places: Sequence[int], rng: random.Random) -> Iterator[list[int]]:
    """Orders of `places` without end: whole designs one after another.

    Which place stands where in a design, and which order of it comes when, is drawn from `rng`.
    """
    places = list(places)
    while places:
        names = rng.sample(places, len(places))
        rows = design(len(places))
        for row in rng.sample(rows, len(rows)):
            yield [names[place] for place in row]
