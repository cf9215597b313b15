"""Whether a kernel's parts and roles are those that `fuse` was told of, before it had them."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.distributed.team import Team
from stretto.kernels.engine.mainloop import Mainloop, Role
from stretto.kernels.engine.parts import Parts


def check_parts(
    name: str,
    parts: Parts,
    team: Team | None,
    mainloop: Mainloop,
    *,
    waits: bool,
    signals: bool,
) -> None:
    """Raises ValueError unless the parts are those that memory and semaphores were made for."""
    has_arrival = any(stream.arrival is not None for stream in (parts.lhs, parts.rhs))
    for what, given, announced in (
        ("an Arrival (waits)", has_arrival, waits),
        ("a Sink with `stored` (signals)", parts.sink.stored is not None, signals),
        ("a Transfer (team)", parts.transfer is not None, team is not None),
    ):
        if given != announced:
            raise ValueError(
                f"kernel {name}: its parts {'have' if given else 'do not have'} {what}, and fuse()"
                f" was told that they {'do' if announced else 'do not'}."
            )
    if not isinstance(parts.fold, mainloop.product.fold):
        raise ValueError(
            f"kernel {name}: its fold is {type(parts.fold).__name__} and the main loop was made for"
            f" {mainloop.product.fold.__name__}; they must be the same."
        )


def check_roles(name: str, mainloop: Mainloop, roles: Sequence[Role]) -> None:
    """Raises ValueError unless a main loop's roles are as many as a block has room for."""
    warpgroups = sum(role.warpgroups for role in roles)
    warps = sum(not role.warpgroups for role in roles)
    if (warpgroups, warps) != (mainloop.warpgroups, mainloop.warps):
        raise ValueError(
            f"kernel {name}: the roles of its main loop take {warpgroups} warpgroups and {warps}"
            f" warps, which announced {mainloop.warpgroups} and {mainloop.warps}; they must agree."
        )
