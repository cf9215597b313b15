"""Configurations of the tuner, a few of them drawn, as one peer: the best of them is timed."""

from __future__ import annotations

import json
import random

from jax.sharding import Mesh

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.measurements.machine import is_gpu
from stretto.benchmarks.measurements.results import Draw
from stretto.benchmarks.peers.peer import FUSED, Peer
from stretto.benchmarks.peers.peers import PEERS
from stretto.benchmarks.timing.tune import configs_for
from stretto.kernels.choice.config_data import to_data
from stretto.kernels.problem.machine import Machine

DRAWN = "drawn"
"""The peer's name."""


def with_kernels(draw: Draw) -> list[Peer]:
    """The peers of a draw that may be kernels."""
    return [PEERS["auto"], *([peer(draw)] if draw.candidates else [])]


def peer(draw: Draw) -> Peer:
    """The peer whose candidates are up to `draw.candidates` configurations of the tuner's.

    Which ones comes from the draw's seed and the case. On a CPU they compute by XLA.
    """

    def candidates(case: Case, mesh: Mesh) -> list[Candidate]:
        device = mesh.devices.flat[0]
        on_gpu = is_gpu(device.platform)
        machine = Machine.of_kind(device.platform, device.device_kind)
        configs = configs_for(case, machine)
        rng = random.Random(f"{draw.seed} {case}")
        return [
            Candidate(
                body=case.call("pallas" if on_gpu else "auto", config),
                operands=case.operands,
                config=json.dumps(to_data(config)),
            )
            for config in rng.sample(configs, min(draw.candidates, len(configs)))
        ]

    return Peer(
        name=DRAWN,
        label="the best configuration drawn",
        role=FUSED,
        candidates=candidates,
        by_xla=False,
        trace_s=float(draw.candidates),
    )
