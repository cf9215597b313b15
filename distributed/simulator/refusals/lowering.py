"""What JAX has against lowering a kernel for GPUs, as a flaw of the kernel with its line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from stretto.distributed.private_jax.lowering import Refusal
from stretto.distributed.simulator.reports.flaws import Flaw, equations
from stretto.distributed.sites import UNKNOWN_SITE, Site, site_of

_THREADS = 128


def flaw_of(refusal: Refusal, kernel: str, jaxpr: Any, *, gpu: str = "an H100") -> Flaw:
    """The flaw of a kernel with the body `jaxpr` that JAX refuses to lower for such a GPU."""
    site = _site(refusal, jaxpr)
    text = f"JAX does not lower kernel {kernel} for {gpu}: {refusal.text}"
    if splat := _SPLAT.search(refusal.text):
        text += (
            f" That is, an array of shape {splat[1]} with the same value everywhere is stored"
            f" {splat[2]} elements a thread at a time, which takes a multiple of"
            f" {int(splat[2]) * _THREADS} elements."
        )
    if site.line:
        return Flaw("does not compile", f"{text}\n  at {site}", site)
    return Flaw("does not compile", text + _suspects(jaxpr))


_SPLAT = re.compile(r"WGStridedFragLayout\(shape=(\(.*?\)), vec_size=(\d+)\)")


def _suspects(jaxpr: Any) -> str:
    """Where to look if JAX does not say where."""
    found = list(dict.fromkeys(_odd_arrays(jaxpr)))[:4]
    if not found:
        return ""
    text = (
        "\n  It does not say where. Unless it is tiled, an array is spread over the 128 threads of"
        " a warpgroup, so look at the arrays whose number of elements is no multiple of that:"
    )
    return "\n    ".join([text, *found])


def _site(refusal: Refusal, jaxpr: Any) -> Site:
    for eqn in reversed(refusal.eqns):
        if (site := site_of(eqn)).line:
            return site
    if refusal.line is None:
        return UNKNOWN_SITE
    file, line, primitive = refusal.line
    for eqn in equations(jaxpr):
        # The line may be of a wrapper; the equation knows from where that was called.
        if eqn.primitive.name == primitive and _passes(eqn, file, line):
            return site_of(eqn)
    return Site(file, line, primitive)


def _passes(eqn: Any, file: str, line: int) -> bool:
    traceback = getattr(eqn.source_info, "traceback", None)
    frames = () if traceback is None else traceback.frames
    return any(frame.line_num == line and frame.file_name == file for frame in frames)


def _odd_arrays(jaxpr: Any) -> Iterator[str]:
    """Loads of arrays that do not divide among the threads of a warpgroup, and their lines."""
    for eqn in equations(jaxpr):
        for variable in eqn.outvars if eqn.primitive.name in ("get", "load", "swap") else ():
            shape = getattr(variable.aval, "shape", ())
            if shape and math.prod(shape) % _THREADS:
                yield f"{'x'.join(map(str, shape))} at {site_of(eqn)}"
