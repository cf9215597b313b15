"""What `kernel.launch` takes and refuses of its arguments, before a kernel is traced."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import jax.numpy as jnp
import numpy as np

from stretto.distributed import residency
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team

OWN_NAMES = ("block_done", "handshake")
"""Of scratch and semaphores that the launch adds, or passes to a body itself."""


def check_names(
    name: Any, team: Any, arrays: Mapping[str, Any], scratch: Mapping[str, Any]
) -> None:
    """The kernel's name, its team, and the names of its semaphores and its scratch.

    Raises:
      TypeError: one is of another type.
      ValueError: a name stands twice, or for something of the launch's own.
    """
    if not isinstance(name, str):
        raise TypeError(f"name={name!r:.60} of a kernel is of type {type(name).__name__}, not str.")
    if not (team is None or isinstance(team, Team)):
        raise TypeError(
            f"kernel {name}: team={team!r:.60} is of type {type(team).__name__}; pass"
            " Team.along(axis_name), or None for a kernel on one device."
        )
    for key, group in (("semaphore_arrays", arrays), ("scratch", scratch)):
        if not isinstance(group, Mapping):
            raise TypeError(
                f"kernel {name}: {key} is of type {type(group).__name__}; it must be a dictionary"
                " by the names of the body's parameters."
            )
    for key, array in arrays.items():
        if not isinstance(array, SemaphoreArray):
            raise TypeError(
                f"kernel {name}: semaphore_arrays[{key!r}] is of type {type(array).__name__}; it"
                " must be a SemaphoreArray."
            )
    if twice := sorted(arrays.keys() & scratch.keys()):
        raise ValueError(
            f"kernel {name}: {', '.join(twice)} is a name in semaphore_arrays and in scratch; the"
            " body gets both by name, so rename one."
        )
    if own := sorted((arrays.keys() | scratch.keys()) & set(OWN_NAMES)):
        raise ValueError(
            f"kernel {name}: the name {', '.join(own)} is the launch's own; choose another."
        )


def check_counts(
    name: str,
    num_blocks: Any,
    cluster: Any,
    num_threads: Any,
    waiting_warps: int,
    team: Team | None,
) -> None:
    """Blocks, clusters, warpgroups.

    Raises:
      TypeError: one is no integer.
      ValueError: blocks that cannot be resident together or that are not whole clusters, too few
        of something, or warps that wait for no team.
    """
    counts = dict(num_blocks=num_blocks, cluster=cluster, num_threads=num_threads)
    for key, count in counts.items():
        if not isinstance(count, Integral):
            raise TypeError(
                f"kernel {name}: {key}={count!r:.60} is of type {type(count).__name__}; it must be"
                " an int."
            )
    if num_threads < 1:
        raise ValueError(
            f"kernel {name}: num_threads={num_threads} must be at least 1, the warpgroups of a"
            " block."
        )
    if cluster < 1 or num_blocks % cluster:
        raise ValueError(
            f"kernel {name}: num_blocks={num_blocks} must be a multiple of cluster={cluster}, which"
            " must be at least 1."
        )
    limit = residency.num_multiprocessors()
    if not 1 <= num_blocks <= limit:
        raise ValueError(
            f"kernel {name}: num_blocks={num_blocks} must be between 1 and {limit}, the number of"
            " multiprocessors that it may fill: its blocks wait for each other and must all be"
            " resident."
        )
    if waiting_warps < 0 or (waiting_warps and team is None):
        raise ValueError(
            f"kernel {name}: waiting_warps={waiting_warps} must not be negative, and needs a"
            " team to wait for."
        )


def check_body(name: str, body: Any, waiting_warps: int) -> None:
    """The body's parameter `handshake`, which `waiting_warps` passes.

    Raises:
      TypeError: with `waiting_warps` the body has no such parameter, or without it needs one.
    """
    try:
        parameters = inspect.signature(body).parameters.values()
    except (TypeError, ValueError):  # A callable without a signature.
        return
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    own = [p for p in parameters if p.name == "handshake"]
    if waiting_warps and not (own or takes_any):
        raise TypeError(
            f"kernel {name}: waiting_warps={waiting_warps} passes the body a handshake, by which it"
            " waits for its peers itself; give the body a parameter `handshake`, or leave out"
            " waiting_warps."
        )
    if own and own[0].default is own[0].empty and not waiting_warps:
        raise TypeError(
            f"kernel {name}: the body has a parameter `handshake`, which only a kernel with"
            " waiting_warps passes; leave out the parameter, or pass waiting_warps."
        )


def as_arrays(operands: Sequence[Any]) -> tuple[Any, ...]:
    """NumPy's arrays and numbers among them as JAX's, of the types that JAX computes with."""
    of_numpy = np.ndarray | np.generic
    return tuple(jnp.asarray(x) if isinstance(x, of_numpy) else x for x in operands)


def check_arrays(name: str, operands: Any, out_type: Any, symmetric: Any) -> None:
    """Operands, results and symmetric buffers.

    Raises:
      TypeError: results or buffers are not given in a list or tuple, or one is no array.
      ValueError: an array has no elements. XLA has no memory for it, and ends the process.
      NotImplementedError: elements are wider than 32 bits.
    """
    for key, group in (("out_type", out_type), ("symmetric", symmetric)):
        if not isinstance(group, Sequence):
            raise TypeError(
                f"kernel {name}: {key} is of type {type(group).__name__}; it must be a list of"
                " jax.ShapeDtypeStruct, also for one array."
            )
    kinds = ("operand", operands), ("result", out_type), ("symmetric buffer", symmetric)
    for kind, group in kinds:
        for index, x in enumerate(group):
            if not (hasattr(x, "shape") and hasattr(x, "dtype")):
                raise TypeError(
                    f"kernel {name}: {kind} {index} is of type {type(x).__name__}; it has no shape"
                    " and dtype, as an array or a jax.ShapeDtypeStruct has."
                )
            if math.prod(x.shape) == 0:
                raise ValueError(
                    f"kernel {name}: {kind} {index} has shape {tuple(x.shape)}, and a kernel takes"
                    " no array without elements; leave it out for such sizes."
                )
            if x.dtype.itemsize > 4:
                raise NotImplementedError(
                    f"kernel {name}: {kind} {index} is {x.dtype}; elements must not be wider than"
                    " 32 bits. Cast it, or pass two words of each with"
                    " lax.bitcast_convert_type(x, jnp.uint32)."
                )
