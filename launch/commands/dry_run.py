"""What ``stretto run --dry-run`` shows instead of starting anything."""

import shlex

from stretto.launch.planning.job import Job


def describe(job: Job) -> str:
    """The commands that would start the agents, the processes, and the variables passed on."""
    first = job.commands[0]
    lines = [shlex.join(first.argv)]
    if len(job.commands) > 1:
        lines[0] += f"    # {len(job.commands)} times, no mpirun"
    lines.append(f"each process runs: python {shlex.join(job.arguments)}")
    for process in job.layout.processes:
        devices = ", ".join(map(str, process.device_ids))
        kind = "GPU" if job.layout.platform == "gpu" else "CPU device"
        lines.append(f"  process {process.process_id} on {process.host}: {kind} {devices}")
    lines.append("environment passed on, beside each host's own PATH, HOME and the like:")
    lines += [f"  {name}={value!r}" for name, value in sorted(job.environ.items())]
    return "\n".join(lines)
