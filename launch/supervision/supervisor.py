"""Runs one attempt of a job and reports how it ended.

The first process that fails ends the job; after a moment in which other evidence may arrive,
the rest are ended and the cause is printed, last. Symptoms are given longer: what is behind them
may be seen later than they are. A process that a signal holds counts as failed after a while, since
the others wait for it, and so does an agent that does not answer. The time limit ends a job that
hangs, and shows where each of its processes is.
"""

import signal
import time
from dataclasses import replace

from stretto.launch import environment
from stretto.launch.errors import LaunchError
from stretto.launch.planning.job import Job
from stretto.launch.supervision.causes import Failure, Rank, first_cause, left_early
from stretto.launch.supervision.console import Console
from stretto.launch.supervision.departures import Departures
from stretto.launch.supervision.programs import Comparison, hints
from stretto.launch.supervision.report import TIMEOUT_STATUS, failure_text, whereabouts_text
from stretto.launch.supervision.session import Interrupted, Session
from stretto.launch.supervision.start import begin

_SETTLE_S = 0.7
_SYMPTOMS_SETTLE_S = 3.0
_STACKS_WAIT_S = 1.5
_STOPPED_LIMIT_S = 8.0
_LOOK_EVERY_S = 0.25
_ABANDONED_LIMIT_S = 3.0
_LAUNCHER_END_S = 1.0
_LAUNCHER_LINES = 5
_LAUNCHER_WORDS_S = 3.0
_MANY = 64  # processes, which take some time to end; the cause is also printed before they end


def run(job: Job, console: Console, lost_hosts: set[str] | None = None) -> int:
    """Run a job to its end; returns its exit status: 0, the first failure's, 124 at the limit.

    Args:
      job: what to run.
      console: takes what its processes write.
      lost_hosts: gets the names of the hosts from which nothing was heard any more.

    Raises:
      LaunchError: the processes could not be started, or mpirun or srun was ended.
      Interrupted: a signal ended the job; nothing is left running.
      BrokenPipeError: nobody reads the job's output any more; nothing is left running.
    """
    began = time.monotonic()
    with Session(job, console) as session:
        try:
            session.start()
            begin(session)
            timed_out = _follow(session)
            cause = _cause(session) if session.failures else None
            others = _others_text(session)
            if any(failure.by_launcher for failure in session.failures):
                _hear_launcher(session)
            if cause is not None and len(session.members) > _MANY:
                console.say(_at_once_text(session, cause))
        except Interrupted as interrupt:
            console.say(_farewell(interrupt, job.grace_s))
            session.stop(_passed_on(interrupt), job.grace_s)
            raise
        session.stop()
    if lost_hosts is not None and not job.is_local:
        lost_hosts |= _lost_hosts(session)
    if cause is not None:
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
    if len(session.members) > 1 and all(member.stayed_alone for member in session.members):
        console.say(_alone_text(len(session.members)))
    return 0


def _at_once_text(session: Session, cause: Failure) -> str:
    host = session.members[cause.process_id].host
    return (
        f"stretto: process {cause.process_id} of {len(session.members)} on {host} failed: "
        f"{cause.how}; ending the others"
    )


def _passed_on(interrupt: Interrupted) -> int:
    """What processes get: Ctrl-C as such, which Python raises; else SIGTERM."""
    return signal.SIGINT if interrupt.number == signal.SIGINT else signal.SIGTERM


def _farewell(interrupt: Interrupted, grace_s: float) -> str:
    name = signal.Signals(interrupt.number).name
    return (
        f"stretto: {name}; the processes have {grace_s:g} s to end (--grace), a second signal ends "
        "them at once"
    )


def _lost_hosts(session: Session) -> set[str]:
    """Hosts, as the plan calls them, whose connection broke or that did not end when told to."""
    return {
        process.host
        for member, process in zip(session.members, session.job.layout.processes, strict=False)
        if member.lost_host or not member.over
    }


def _hear_launcher(session: Session) -> None:
    """Wait a little for what srun or mpirun has to say on the end that it made of processes."""
    if any(environment.AGENT_INDEX in command.environ for command in session.job.commands):
        return  # agents that this process has started itself
    until = time.monotonic() + _LAUNCHER_WORDS_S
    while time.monotonic() < until and not session.launchers.have_ended():
        session.wait()
    session.wait()


def _alone_text(count: int) -> str:
    return (
        f"stretto: warning: {count} jobs of one process have run, and not one of {count}: no "
        "process joined the others. Call stretto.initialize() before JAX is asked for its "
        "devices."
    )


def _follow(session: Session) -> bool:
    """Until all processes have ended or the first failure is understood; True at the limit.

    Raises:
      LaunchError: mpirun or srun is gone, though its processes are not.
    """
    limit_s = session.job.timeout_s
    deadline = None if limit_s is None else time.monotonic() + limit_s
    watch = _Watch(session)
    running = session.running()
    while running:
        session.wait()
        running -= session.have_ended()
        watch.check_launchers()
        if session.failures:
            if watch.has_settled():
                return False
        elif deadline is not None and time.monotonic() >= deadline:
            session.send_all("stacks")
            until = time.monotonic() + _STACKS_WAIT_S
            while time.monotonic() < until:
                session.wait()
            return True
        else:
            watch.look_for_failures()
    return not session.drain(None if deadline is None else deadline - time.monotonic())


class _Watch:
    """What is looked out for while a job runs."""

    def __init__(self, session: Session):
        self._session = session
        self._comparison = Comparison(session.members)
        self._departures = Departures(session.members)
        self._looked_at = 0.0
        self._first_failure_at: float | None = None
        self._first_cause_at: float | None = None
        self._abandoned_at: float | None = None

    def check_launchers(self) -> None:
        """Raises LaunchError once mpirun or srun has been gone for a while, and processes run."""
        if not self._session.launchers.have_ended():
            return
        now = time.monotonic()
        self._abandoned_at = self._abandoned_at or now + _ABANDONED_LIMIT_S
        if now >= self._abandoned_at:
            raise LaunchError("mpirun or srun was ended, though not its processes", status=1)

    def has_settled(self) -> bool:
        """Whether what has failed has had the time to be explained by other evidence."""
        now = time.monotonic()
        if self._first_failure_at is None:
            self._first_failure_at = now
            self._session.send_all("stacks")
        if self._first_cause_at is None:
            ranks = [failure.rank for failure in self._session.failures]
            if min(ranks) < Rank.CUT_OFF or _deserter(self._session) is not None:
                self._first_cause_at = now
        if self._first_cause_at is not None:
            return now >= self._first_cause_at + _SETTLE_S
        return now >= self._first_failure_at + _SYMPTOMS_SETTLE_S

    def look_for_failures(self) -> None:
        """Add what no process says of itself; every process is looked at, so not all the time."""
        session, now = self._session, time.monotonic()
        if now < self._looked_at + _LOOK_EVERY_S:
            return
        self._looked_at = now
        for member in session.members:
            failure = member.stopped_too_long(_STOPPED_LIMIT_S) or member.silent_agent(
                _STOPPED_LIMIT_S
            )
            if failure:
                session.failures.append(failure)
        if self._comparison.wants_news() or self._departures.wants_news():
            session.send_all("look")
        if failure := self._comparison.stuck() or self._departures.stuck():
            session.failures.append(failure)


def _deserter(session: Session) -> Failure | None:
    """A process that had ended with status 0 when another one had a symptom of that."""
    symptom = first_cause(session.failures)
    if symptom.rank is not Rank.SYMPTOM:
        return None
    left = [
        member
        for member in session.members
        if member.finished_at is not None
        and member.is_needed_by(session.members[symptom.process_id])
    ]
    if not left:
        return None
    first = min(left, key=lambda member: member.finished_at or 0.0)
    return left_early(first.process_id, symptom)


def _cause(session: Session) -> Failure:
    cause = _deserter(session) or first_cause(session.failures)
    until = time.monotonic() + _LAUNCHER_END_S
    while (
        cause.rank is Rank.CUT_OFF
        and not session.launchers.have_ended()
        and time.monotonic() < until
    ):
        session.wait()
    if cause.rank is Rank.CUT_OFF and session.launchers.have_ended():
        how = f"{cause.how}; mpirun or srun has ended, too"
        return replace(cause, how=how)
    return cause


def _others_text(session: Session) -> str:
    """Where the processes are that have not failed; empty if all went well or all failed."""
    failed = {failure.process_id for failure in session.failures}
    if deserter := _deserter(session) if session.failures else None:
        failed.add(deserter.process_id)
    waiting = [m for m in session.members if m.process_id not in failed]
    if not waiting or all(member.over for member in session.members):
        return ""
    script = session.job.script
    return whereabouts_text([member.whereabouts(script) for member in waiting])


def _programs_text(session: Session) -> str:
    return hints([member.programs for member in session.members])


def _cause_text(session: Session, cause: Failure, console: Console, elapsed_s: float) -> str:
    layout = session.job.layout
    member = session.members[cause.process_id]
    text = failure_text(
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
    words = session.launchers.output[-_LAUNCHER_LINES:]
    if cause.by_launcher and words:
        text += "\nThe launcher's last lines:\n" + "\n".join(f"  {line}" for line in words)
    return text
