"""Whether kernels can start by counters in memory that all GPUs share."""

import sys

from stretto.launch.doctor.finding import Finding, ok, warning
from stretto.launch.doctor.tools import Output, ask

_TIMEOUT_S = 60


def check_heap(num_gpus: int) -> list[Finding]:
    """The heap of two or more GPUs of one process."""
    if num_gpus < 2:
        return []
    return [
        judge_answer(ask([sys.executable, "-m", "stretto.launch.doctor.heap_probe"], _TIMEOUT_S))
    ]


def judge_answer(answer: Output) -> Finding:
    """What the probe printed, or why it printed nothing."""
    told = answer.as_json()
    if "error" in told:
        return warning(
            "heap",
            f"GPUs cannot share memory for the start of kernels: {told['error']}",
            "choose GPUs that reach each other by CUDA_VISIBLE_DEVICES, or set STRETTO_HEAP=0:"
            " small kernels then start some 10 us later",
        )
    return ok("heap", f"{told['gpus']} GPUs share memory for the start of kernels")
