"""What each primitive does in the simulator, one file a kind; to import them registers them."""

from stretto.distributed.simulator.rules import (  # noqa: F401
    arrays,
    async_store,
    barriers,
    cluster_launch,
    control,
    copy,
    device_code,
    loops,
    mail,
    memory,
    mma,
    scalar,
    scope,
    shapes,
    sync,
    tensor_cores,
    tensor_memory,
)
