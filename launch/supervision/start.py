"""How an attempt begins: all agents connect, are checked against each other, and get the script.

What is checked here would otherwise show as a hang inside JAX: a launcher that started the
wrong number of processes, different versions on two hosts, a host name that CPU collectives
cannot use, a coordinator that a host cannot reach.
"""

import time
from collections.abc import Callable

from stretto.launch import environment
from stretto.launch.errors import LaunchError
from stretto.launch.planning import network
from stretto.launch.planning.gpus import NVIDIA_SMI_TIMEOUT_S
from stretto.launch.supervision.member import Member
from stretto.launch.supervision.session import Session

_PREPARE_LIMIT_S = 15.0
_LAUNCHER_LINES = 30


def begin(session: Session) -> None:
    """Bring all processes of the session's job to the first line of the script.

    Raises:
      LaunchError: they cannot be started, or would not work together.
    """
    job = session.job
    _gather(session)
    members = session.members
    members.sort(key=lambda member: member.process_id)
    _check_numbers(members, len(job.layout.processes))
    _check_versions(members)
    _check_placement(session)
    _prepare(session)
    coordinator = _choose_coordinator(session)
    for member, process in zip(members, job.layout.processes, strict=True):
        own = {
            environment.PROCESS_ID: str(process.process_id),
            environment.NUM_PROCESSES: str(len(members)),
            environment.LOCAL_PROCESS_ID: str(process.local_process_id),
            environment.NUM_LOCAL_PROCESSES: str(process.num_local_processes),
            environment.COORDINATOR: coordinator,
            environment.RESTART: str(job.attempt),
        }
        devices = {}
        if job.layout.platform == "gpu":
            own[environment.LOCAL_DEVICE_IDS] = ",".join(map(str, process.device_ids))
        else:
            devices[environment.CPU_DEVICES] = str(len(process.device_ids))
        environ = {**devices, **job.environ, **own}
        member.send(
            "start",
            arguments=job.arguments,
            cwd=job.cwd,
            environ=environ,
            grace_s=job.grace_s,
            takes_stdin=job.takes_stdin and process.process_id == 0,
        )
    session.feed_stdin()


def _gather(session: Session) -> None:
    """Wait for all agents to connect."""
    wanted = len(session.job.layout.processes)
    limit_s = session.job.start_timeout_s
    deadline = time.monotonic() + limit_s
    while len(session.members) < wanted:
        gone = session.launchers.have_ended()  # asked first: agents may connect until then
        session.wait()
        for member in session.heard:
            if member.over:
                raise _not_started(session, member, "ended")
        have = len(session.members)
        if have >= wanted:
            return
        if gone:
            raise LaunchError(
                f"only {have} of {wanted} processes could be started" + _words(session)
            )
        if time.monotonic() > deadline:
            missing = sorted(set(range(wanted)) - {m.process_id for m in session.members})
            hosts = {session.job.layout.processes[i].host for i in missing}
            raise LaunchError(
                f"{have} of {wanted} processes started within {limit_s:g} s; nothing heard from "
                f"{', '.join(sorted(hosts))}; {session.job.start_hint}, or raise --start-timeout"
                + _words(session)
            )


def _words(session: Session) -> str:
    """The launcher's own last lines, indented, if it said anything."""
    lines = [line for line in session.launchers.output if line.strip(" -")]
    return "".join(f"\n  {line}" for line in lines[-_LAUNCHER_LINES:])


def _check_numbers(members: list[Member], wanted: int) -> None:
    ids = [member.process_id for member in members]
    counts = {member.count for member in members if member.count is not None}
    if ids != list(range(wanted)) or (counts and counts != {wanted}):
        raise LaunchError(
            f"the launcher numbered its {wanted} processes {ids} of {sorted(counts)}; mpirun and "
            "the MPI library it starts with may be of different kinds: see stretto doctor"
        )


def _check_versions(members: list[Member]) -> None:
    first = members[0]
    for member in members[1:]:
        for name, version in first.versions.items():
            other = member.versions.get(name, "nothing")
            if other != version:
                raise LaunchError(
                    f"{name} is {version} on host {first.host} and {other} on host {member.host}; "
                    "install the same versions on all hosts"
                )


def _check_placement(session: Session) -> None:
    """Processes planned for one host must be on one host, and on no other's."""
    real: dict[str, str] = {}
    for member, process in zip(session.members, session.job.layout.processes, strict=True):
        if real.setdefault(process.host, member.host) != member.host:
            raise LaunchError(
                f"processes meant for {process.host} were started on {real[process.host]} and "
                f"{member.host}; check slots= in the hostfile"
            )
    if len(set(real.values())) < len(real):
        raise LaunchError(
            f"hosts {', '.join(real)} call themselves {', '.join(real.values())}; "
            "give every host a host name of its own, and name each once"
        )


def _prepare(session: Session) -> None:
    """Each agent checks its host; the first offers a port for the coordinator."""
    job = session.job
    many = len(session.members) > 1
    for member, process in zip(session.members, job.layout.processes, strict=True):
        member.channel.limit_silence(job.silence_limit_s)
        member.send(
            "prepare",
            cwd=job.cwd,
            script=job.script,
            devices=list(process.device_ids) if job.layout.platform == "gpu" else [],
            cuda_visible_devices=job.environ.get(environment.CUDA_VISIBLE_DEVICES),
            bind=job.bind,
            silence_limit_s=job.silence_limit_s,
            needs_host_name=many and job.layout.platform == "cpu",
            many_hosts=not job.is_local,
            offer_port=many and not job.is_local and member.process_id == 0,
            port=job.port,
            interface=job.interface,
        )
    limit_s = _PREPARE_LIMIT_S + (NVIDIA_SMI_TIMEOUT_S if job.layout.platform == "gpu" else 0)
    _await(session, lambda m: m.prepared is not None, "did not answer", limit_s=limit_s)
    for member in session.members:
        if member.prepared and member.prepared["problem"]:
            raise LaunchError(member.prepared["problem"])


def _choose_coordinator(session: Session) -> str:
    """``address:port`` of process 0 that all other hosts have reached."""
    job = session.job
    first, *others = session.members
    if job.is_local:
        port = job.port or network.free_port()
        if network.port_is_taken(network.LOOPBACK, port):
            raise LaunchError(f"--port {port} is taken on this machine; choose another, or none")
        return network.endpoint(network.LOOPBACK, port)
    offer = first.prepared or {}
    addresses = offer["addresses"]
    if not addresses:
        where = f" on interface {job.interface}" if job.interface else ""
        raise LaunchError(f"host {first.host} has no network address{where}; see ip address")
    # One of each host: a thousand at once would be more than a port that nobody serves holds.
    of_each_host = {member.host: member for member in reversed(others)}
    remote = [member for host, member in of_each_host.items() if host != first.host]
    for address in addresses:
        for member in remote:
            member.reaches_coordinator = None
            member.send("probe", address=address, port=offer["port"])
        _await(session, lambda m: m.reaches_coordinator is not None, "did not answer", remote)
        if all(member.reaches_coordinator for member in remote):
            return network.endpoint(address, offer["port"])
    blocked = next(member for member in remote if not member.reaches_coordinator)
    raise LaunchError(
        f"host {blocked.host} cannot reach host {first.host} at {', '.join(addresses)} port "
        f"{offer['port']}; check firewalls, or name the interface between them by --interface"
    )


def _await(
    session: Session,
    ready: Callable[[Member], bool],
    problem: str,
    members: list[Member] | None = None,
    limit_s: float = _PREPARE_LIMIT_S,
) -> None:
    deadline = time.monotonic() + limit_s
    members = session.members if members is None else members
    waiting = {member.process_id: member for member in members if not ready(member)}
    heard = [*waiting.values()]
    while waiting:
        for member in heard:
            if member.process_id in waiting:
                if member.over:
                    raise _not_started(session, member, problem)
                if ready(member):
                    del waiting[member.process_id]
        if waiting and time.monotonic() > deadline:
            raise _not_started(session, next(iter(waiting.values())), problem)
        if waiting:
            session.wait()
            heard = session.heard


def _not_started(session: Session, member: Member, problem: str) -> LaunchError:
    where = f"process {member.process_id} on host {member.host}"
    return LaunchError(f"{where} {problem} while starting" + _words(session))
