"""Whether JAX starts, and sees the GPUs that the driver shows."""

import json
import sys

from stretto.launch.doctor.finding import Finding, error, ok, warning
from stretto.launch.doctor.tools import Output, ask

_TIMEOUT_S = 120


def check_jax(num_gpus: int) -> list[Finding]:
    """Start JAX once. ``num_gpus`` is how many it should see."""
    probe = [sys.executable, "-m", "stretto.launch.doctor.jax_probe"]
    no_hoarding = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return [judge_jax_devices(ask(probe, _TIMEOUT_S, no_hoarding), num_gpus)]


def judge_jax_devices(answer: Output, num_gpus: int) -> Finding:
    """What the probe printed, against what the driver shows."""
    try:
        seen = json.loads(answer.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return error(
            "jax devices",
            f"JAX does not start: {answer.last_words()}",
            "run python -c 'import jax; jax.devices()' for the whole message",
        )
    count = len(seen["kinds"])
    if not seen["adds"]:
        return error("jax devices", "1 + 1 is not 2 on some device", "test the GPUs' memory")
    text = f"{count} {seen['platform']} device{'s' * (count != 1)} ({seen['kinds'][0]})"
    if num_gpus and seen["platform"] != "gpu":
        return error(
            "jax devices",
            f"{text}, though the driver shows {num_gpus} GPUs",
            "install stretto[cuda13] or stretto[cuda12], as the driver allows",
        )
    if num_gpus and count != num_gpus:
        return warning(
            "jax devices",
            f"{text}, of the {num_gpus} GPUs that should be visible",
            "check CUDA_VISIBLE_DEVICES and JAX_PLATFORMS",
        )
    return ok("jax devices", text)
