"""Messages of a process to its agent: its progress, and the programs that it compiles.

``stretto.launch.progress`` is for the report if a job hangs; the programs are compared with those
of the other processes (``programs.py``).
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping

from stretto.launch import environment

RECORD_SIZE = 256
_target: environment.Target | None = None


def progress(step: int, operation: str = "") -> None:
    """Note that this process is at ``step``, and in ``operation`` if it is in one.

    Costs about a microsecond (one write to memory that the process's agent reads when it must),
    and does nothing in a script that ``stretto run`` did not start. When the job fails or
    reaches its time limit, the report shows each process's last note::

        for step in range(steps):
            stretto.launch.progress(step, "all_gather_matmul")
            state = train_step(state)

    Args:
      step: the number of the step.
      operation: what it waits in, should it hang; cut after 200 bytes.
    """
    global _target
    if _target is None:
        _target = environment.target(environment.PROGRESS)
    if _target.is_open:
        with contextlib.suppress(OSError):  # no step fails because it cannot be noted
            os.pwrite(_target.fd, encode(step, operation), 0)


def encode(step: int, operation: str) -> bytes:
    """A record of fixed size, so that a shorter one leaves nothing of a longer one behind."""
    words = f"step {step}" + (f" in {operation}" if operation else "")
    return words.encode("utf-8", "replace")[: RECORD_SIZE - 1].ljust(RECORD_SIZE, b"\0")


def decode(record: bytes) -> str:
    """``step 5 in all_gather_matmul``; empty if nothing was noted."""
    return record.partition(b"\0")[0].decode("utf-8", "replace")


def tell_that_it_joins() -> None:
    """Report to the agent that this process joins the others, who will wait for it.

    Does nothing in a script that ``stretto run`` did not start.
    """
    _tell(environment.target(environment.RECORD), {"joins": True})


def tell_programs() -> None:
    """Report to the agent every program that this process compiles together with others.

    Does nothing in a script that ``stretto run`` did not start, or where
    ``STRETTO_CHECK_PROGRAMS`` is 0.
    """
    target = environment.target(environment.RECORD)
    if not target.is_open or environment.current().get(environment.CHECK_PROGRAMS) == "0":
        return
    from stretto.distributed.private_jax import programs

    programs.watch(lambda program: _tell(target, {"program": dataclasses.asdict(program)}))


def _tell(target: environment.Target, record: Mapping[str, object]) -> None:
    if target.is_open:
        with contextlib.suppress(OSError):
            os.write(target.fd, json.dumps(record).encode("ascii") + b"\n")
