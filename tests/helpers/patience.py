"""How long tests wait for GPUs that several processes share.

The driver gives each process that uses a GPU its turn. So a kernel's step that needs a signal from
another GPU, where the turns come in another order, takes up to a turn of every process. Limits of
time grow with the number of processes; what is awaited stays the same.
"""

from __future__ import annotations

import os

import processes

PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) * processes.COUNT
"""How many processes of this run share the GPUs: the workers of pytest-xdist, or those of a job."""
TEST_S = 180


def shared(seconds: float) -> float:
    """The limit of what takes up to `seconds` in a process that has the GPUs to itself."""
    return seconds * PROCESSES
