"""Which GPUs reach each other's memory: by the driver's report, and by a test store."""

import sys
from collections.abc import Sequence

from stretto.launch.doctor.finding import Finding, error, ok, warning
from stretto.launch.doctor.tools import Output, ask

_TIMEOUT_S = 60
Matrix = Sequence[Sequence[bool | None]]


def check_peers(num_gpus: int) -> list[Finding]:
    """The peer matrix of two or more GPUs."""
    if num_gpus < 2:
        return []
    probe = [sys.executable, "-m", "stretto.launch.doctor.peer_probe"]
    return [judge_answer(ask(probe, _TIMEOUT_S))]


def judge_answer(answer: Output) -> Finding:
    """What the probe printed, or why it printed nothing."""
    told = answer.as_json()
    if "error" in told:
        return warning(
            "peers",
            f"could not be tested: {told['error']}",
            "check that no other job holds the GPUs, then run the doctor again",
        )
    return judge_matrix(told["reached"])


def judge_matrix(reached: Matrix) -> Finding:
    """Lost stores are errors: a kernel over that pair would wait for what never arrives."""
    size = range(len(reached))
    lost = [f"{i} to {j}" for i in size for j in size if reached[i][j] is False]
    if lost:
        return error(
            "peers",
            f"stores from GPU {', '.join(lost)} do not arrive, though the driver allows them",
            "turn off ACS and the IOMMU for these slots, and update the driver",
        )
    one_way = [f"{i} to {j}" for i in size for j in size if reached[i][j] and reached[j][i] is None]
    if one_way:
        return error(
            "peers",
            f"access goes one way only: GPU {', '.join(one_way)}",
            "choose other GPUs by CUDA_VISIBLE_DEVICES",
        )
    groups = islands(reached)
    if len(groups) > 1:
        names = " | ".join(",".join(map(str, group)) for group in groups)
        return warning(
            "peers",
            f"no access between the groups {names}",
            "keep teams within a group: choose GPUs by CUDA_VISIBLE_DEVICES",
        )
    return ok("peers", f"{len(reached)} GPUs; a store from each arrived at every other")


def islands(reached: Matrix) -> list[list[int]]:
    """Groups of GPUs in which each reaches all others; found greedily, in order."""
    groups: list[list[int]] = []
    for gpu in range(len(reached)):
        for group in groups:
            if all(reached[gpu][member] and reached[member][gpu] for member in group):
                group.append(gpu)
                break
        else:
            groups.append([gpu])
    return groups
