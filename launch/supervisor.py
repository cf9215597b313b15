"""Runs one attempt of a job and tells how it ended.

The first process that fails ends the job; after a moment in which other evidence may arrive,
the rest are ended and the cause is printed, last. A process that a signal holds counts as
failed after a while, since the others wait for it. The time limit ends a job that hangs, and
shows where each of its processes is.
"""

import time

from stretto.launch.console import Console
from stretto.launch.job import Job
from stretto.launch.report import TIMEOUT_STATUS, Failure, failure_text, first_cause, places_text
from stretto.launch.session import Interrupted, Session
from stretto.launch.start import begin

_SETTLE_S = 0.7
_STACKS_WAIT_S = 1.5
_STOPPED_LIMIT_S = 8.0


def run(job: Job, console: Console) -> int:
    """Run a job to its end; returns its exit status: 0, the first failure's, 124 at the limit.

    Raises:
      LaunchError: the processes could not be started.
      Interrupted: a signal ended the job; nothing is left running.
    """
    began = time.monotonic()
    with Session(job, console) as session:
        try:
            session.start()
            begin(session)
            timed_out = _follow(session)
        except Interrupted:
            session.stop()
            raise
        where = _places(session) if timed_out else ""
        session.stop()
    if session.failures:
        cause = first_cause(session.failures)
        console.say(_cause_text(session, cause, console, cause.moment - began))
        return cause.status
    if timed_out:
        console.say(f"stretto: the time limit of {job.timeout_s:g} s is over, with\n{where}")
        return TIMEOUT_STATUS
    return 0


def _follow(session: Session) -> bool:
    """Until all processes have ended or the first failure is understood; True at the limit."""
    limit_s = session.job.timeout_s
    deadline = None if limit_s is None else time.monotonic() + limit_s
    settled_at = None
    while not all(member.over for member in session.members):
        session.wait()
        now = time.monotonic()
        if session.failures:
            settled_at = settled_at or now + _SETTLE_S
            if now >= settled_at:
                return False
        elif deadline is not None and now >= deadline:
            return True
        else:
            for member in session.members:
                if failure := member.stopped_too_long(_STOPPED_LIMIT_S):
                    session.failures.append(failure)
    return False


def _places(session: Session) -> str:
    """Where each process is, by its own stacks."""
    for member in session.members:
        member.send("stacks")
    until = time.monotonic() + _STACKS_WAIT_S
    while time.monotonic() < until:
        session.wait()
    script = session.job.arguments[0]
    return places_text(
        {member.process_id: member.place(script) for member in session.members},
        {member.process_id: member.state for member in session.members},
    )


def _cause_text(session: Session, cause: Failure, console: Console, elapsed_s: float) -> str:
    layout = session.job.layout
    return failure_text(
        cause,
        layout.processes[cause.process_id],
        session.members[cause.process_id].host,
        platform=layout.platform,
        num_processes=len(layout.processes),
        elapsed_s=elapsed_s,
        log_note=console.log_note(cause.process_id),
        stderr_tail=console.stderr_tail(cause.process_id),
    )
