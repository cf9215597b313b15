"""Timers visited in turns, in balanced orders, so that the card's drift affects all equally."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from stretto.benchmarks.timing import balance
from stretto.benchmarks.timing.timers import SAMPLES_PER_VISIT, Timer


def in_turns(
    timers: Sequence[Timer],
    samples: int,
    *,
    seed: int = 0,
    per_visit: int = SAMPLES_PER_VISIT,
    rest_s: float = 0.0,
    visited: Callable[[int], None] = lambda place: None,
    failed: Callable[[int, Exception], None] | None = None,
    enough: Callable[[Sequence[Sequence[float]]], bool] = lambda found: False,
    say: Callable[[str], None] = lambda _: None,
) -> list[list[float]]:
    """So many `samples` of each timer, in its unit; fewer where these are `enough`.

    Args:
      timers: visited in a new order each round (`balance.orders`). It comes from the seed, so that
        it is the same on every process.
      samples: of each.
      seed: of the orders.
      per_visit: samples of a visit; the last one takes what is left.
      rest_s: seconds of idle after each visit.
      visited: called with the place of a timer right after each visit of it, before the rest.
      failed: called with the place and the error of a timer that raised; the timer is left out from
        then on, without samples. None to raise it.
      enough: called after each round with the samples of each timer so far; True ends the turns.
        All processes must say the same.
      say: called with the remaining work.
    """
    rng = random.Random(seed)
    found: list[list[float]] = [[] for _ in timers]
    active = list(range(len(timers)))
    rounds = balance.orders(active, rng)
    while samples > 0 and active:
        say(f"timing, {samples} samples to go")
        for place in next(rounds):
            try:
                found[place] += timers[place].visit(min(samples, per_visit))
                visited(place)
            except Exception as error:
                if failed is None:
                    raise
                active.remove(place)
                rounds = balance.orders(active, rng)
                found[place] = []
                failed(place, error)
            time.sleep(rest_s)
        samples -= per_visit
        if enough(found):
            break
    return found
