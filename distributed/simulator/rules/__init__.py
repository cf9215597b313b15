"""What each primitive does in the simulator, one file a kind; to import them registers them."""

from stretto.distributed.simulator.rules import (  # noqa: F401
    arrays,
    async_store,
    barriers,
    control,
    copy,
    loops,
    memory,
    mma,
    scalar,
    scope,
    shapes,
    sync,
)
