"""JAX's notice of preemption takes SIGTERM from the first call that asks for it, not before.

``jax.distributed.initialize`` installs a handler of SIGTERM below Python's. A script that never
asks ``multihost_utils.reached_preemption_sync_point`` then runs on after that signal, and a handler
that it installed before is not called. Whoever asks is served as by JAX alone: a notice that
reached another process earlier is in the coordinator.

Private JAX, checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed

_OPTION = "jax_enable_preemption_service"


@contextlib.contextmanager
def when_asked_for() -> Iterator[None]:
    """Around ``jax.distributed.initialize``: leaves SIGTERM as it is until the script asks.

    Where the service is turned off, or JAX has no such option, it changes nothing.
    """
    if not getattr(jax.config, _OPTION, False):
        yield
        return
    jax.config.update(_OPTION, False)
    try:
        yield
    finally:
        jax.config.update(_OPTION, True)
    distributed.global_state.preemption_sync_manager = _FromFirstCall()


class _FromFirstCall:
    """In place of JAX's manager, which it makes, starts and calls when it is first called."""

    def reached_sync_point(self, step_id: int) -> bool:
        state = distributed.global_state
        if state.preemption_sync_manager is self:
            state.preemption_sync_manager = None
            state.initialize_preemption_sync_manager()
        manager: Any = state.preemption_sync_manager
        return manager.reached_sync_point(step_id)

    def shutdown(self) -> None:
        """Nothing was started."""
