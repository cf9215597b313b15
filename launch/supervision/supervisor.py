"""Runs one attempt of a job and tells how it ended.

The first process that fails ends the job; after a moment in which other evidence may arrive,
the rest are ended and the cause is printed, last. A process that a signal holds counts as
failed after a while, since the others wait for it. The time limit ends a job that hangs, and
shows where each of its processes is.
"""

import time

from stretto.launch.errors import LaunchError
from stretto.launch.planning.job import Job
from stretto.launch.supervision.console import Console
from stretto.launch.supervision.programs import Comparison, hints
from stretto.launch.supervision.report import (
    TIMEOUT_STATUS,
    Failure,
    failure_text,
    first_cause,
    whereabouts_text,
)
from stretto.launch.supervision.session import Interrupted, Session
from stretto.launch.supervision.start import begin

_SETTLE_S = 0.7
_STACKS_WAIT_S = 1.5
_STOPPED_LIMIT_S = 8.0
_ABANDONED_LIMIT_S = 3.0


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
            others = _others_text(session)
        except Interrupted:
            session.stop()
            raise
        session.stop()
    if session.failures:
        cause = first_cause(session.failures)
        if others:
            console.say(f"stretto: when process {cause.process_id} failed, of the others\n{others}")
        console.say(_cause_text(session, cause, console, cause.moment - began))
        if cause.is_runtimes_own and (text := _programs_text(session)):
            console.say(text)
        return cause.status
    if timed_out:
        console.say(f"stretto: the time limit of {job.timeout_s:g} s is over, with\n{others}")
        if text := _programs_text(session):
            console.say(text)
        return TIMEOUT_STATUS
    return 0


def _follow(session: Session) -> bool:
    """Until all processes have ended or the first failure is understood; True at the limit.

    Raises:
      LaunchError: mpirun or srun is gone, though its processes are not.
    """
    limit_s = session.job.timeout_s
    deadline = None if limit_s is None else time.monotonic() + limit_s
    settled_at = abandoned_at = None
    comparison = Comparison(session.members)
    while not all(member.over for member in session.members):
        session.wait()
        now = time.monotonic()
        if session.launchers_ended():
            abandoned_at = abandoned_at or now + _ABANDONED_LIMIT_S
            if now >= abandoned_at:
                raise LaunchError("mpirun or srun was ended, though not its processes", status=1)
        if session.failures:
            if settled_at is None:
                settled_at = now + _SETTLE_S
                _ask_for_stacks(session)
            if now >= settled_at:
                return False
        elif deadline is not None and now >= deadline:
            _ask_for_stacks(session)
            until = time.monotonic() + _STACKS_WAIT_S
            while time.monotonic() < until:
                session.wait()
            return True
        else:
            for member in session.members:
                if failure := member.stopped_too_long(_STOPPED_LIMIT_S):
                    session.failures.append(failure)
            if comparison.is_due():
                _ask_for_stacks(session)  # The answers bring progress that is new.
            elif failure := comparison.stuck():
                session.failures.append(failure)
    return False


def _ask_for_stacks(session: Session) -> None:
    for member in session.members:
        if not member.over:
            member.send("stacks")


def _others_text(session: Session) -> str:
    """Where the processes are that have not failed; empty if all went well or all failed."""
    failed = {failure.process_id for failure in session.failures}
    waiting = [m for m in session.members if m.process_id not in failed]
    if not waiting or all(member.over for member in session.members):
        return ""
    script = session.job.arguments[0]
    return whereabouts_text([member.whereabouts(script) for member in waiting])


def _programs_text(session: Session) -> str:
    return hints([member.programs for member in session.members])


def _cause_text(session: Session, cause: Failure, console: Console, elapsed_s: float) -> str:
    layout = session.job.layout
    member = session.members[cause.process_id]
    return failure_text(
        cause,
        layout.processes[cause.process_id],
        member.host,
        platform=layout.platform,
        num_processes=len(layout.processes),
        elapsed_s=elapsed_s,
        progress=member.progress,
        log_note=console.log_note(cause.process_id),
        stderr_tail=console.stderr_tail(cause.process_id),
    )
