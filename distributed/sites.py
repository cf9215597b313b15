"""Places in kernel source: where an operation of a jaxpr was written."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
from dataclasses import dataclass
from typing import Any

_OURS = re.escape(os.path.join(os.path.dirname(os.path.abspath(__file__)), ""))

# A frame in one of these is plumbing, not kernel code: JAX's own files, Python's, and the wrappers
# of `stretto.distributed` (but not the kernels of JAX, nor those of Stretto).
_PLUMBING = re.compile(
    r"(/jax/(_src|core|interpreters|extend)/"
    r"|/jax/experimental/(mosaic/|pallas/[^/]*\.py$|shard_map)"
    r"|/contextlib\.py$|/functools\.py$"
    rf"|^{_OURS})"
)

# Where no frame is kernel code (JAX keeps the innermost ten), the best available: the pipelines of
# JAX, and what of our distributed layer works by itself.
_PIPELINES = re.compile(
    r"(/_src/pallas/(mosaic_gpu/(pipeline|helpers)|helpers)"
    rf"|^{_OURS}(?!semaphores)[^/]*)\.py$"
)


_DEFINITION = re.compile(r"(?:.*\.)?([\w<>]+) at (.*):(\d+)")
"""How JAX names a function and where it is defined."""


@dataclass(frozen=True)
class Site:
    """A line of kernel source.

    Attributes:
      file: path as Python knows it.
      line: line number, from 1; 0 if unknown.
      function: name of the function that the line is in.
    """

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """The source line itself, stripped; empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        if not self.line:
            return "an unknown line"
        where = f"{_short(self.file)}:{self.line} ({self.function})"
        return f"{where}: {self.text}" if self.text else where


UNKNOWN_SITE = Site("?", 0, "?")


def is_kernel_code(site: Site) -> bool:
    """Whether the line is known, and is neither JAX's own nor of the layers beneath a kernel."""
    return site.line > 0 and not _PLUMBING.search(site.file)


def site_of(eqn: Any) -> Site:
    """The innermost line of kernel source that made `eqn`, an equation of a jaxpr."""
    traceback = getattr(eqn.source_info, "traceback", None)
    if traceback is None:
        return UNKNOWN_SITE
    frames = traceback.frames
    for frame in frames:
        if not _PLUMBING.search(frame.file_name):
            return Site(frame.file_name, frame.line_num, frame.function_name)
    for frame in frames:
        if _PIPELINES.search(frame.file_name):
            return Site(frame.file_name, frame.line_num, frame.function_name)
    return UNKNOWN_SITE


def definition_site(jaxpr: Any) -> Site:
    """Where the function is defined that a jaxpr was made of."""
    match = _DEFINITION.fullmatch(jaxpr.debug_info.func_src_info or "")
    return Site(match[2], int(match[3]), match[1]) if match else UNKNOWN_SITE


def kernel_site(jaxpr: Any) -> Site:
    """Where the function is defined that is the body of a kernel, given the kernel's jaxpr."""
    eqns = jaxpr.eqns
    if eqns and eqns[0].primitive.name == "run_scoped":  # The scope of the scratch.
        return definition_site(eqns[0].params["jaxpr"])
    return definition_site(jaxpr)


def site_of_error(error: BaseException) -> Site:
    """The line of kernel source that was being interpreted when `error` was raised.

    The closures of the interpreter each know their line, so it is found on the way that the error
    took, and steps need not note where they are as long as nothing goes wrong.
    """
    found, traceback = UNKNOWN_SITE, error.__traceback__
    while traceback is not None:
        site = traceback.tb_frame.f_locals.get("site")
        found = site if isinstance(site, Site) else found
        traceback = traceback.tb_next
    return found


def assigned_name(site: Site) -> str | None:
    """The variable that the source line at `site` assigns a call's result to, if it is so plain."""
    match = re.match(r"([A-Za-z_]\w*)\s*=\s*[\w.]+\(", site.text)
    return match.group(1) if match else None


@functools.cache
def parameter_names(function: str) -> tuple[str, ...]:
    """Names of a function's parameters, from JAX's "name at file:line"; none if it has `*args`."""
    match = _DEFINITION.fullmatch(function or "")
    if match is None:
        return ()
    name, file, line = match[1], match[2], int(match[3])
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == line and node.args.vararg is None:
                return tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args))
    return ()


def _short(path: str) -> str:
    """A path from the working directory or, outside of it, its last two parts."""
    here = os.getcwd() + os.sep
    return (
        path.removeprefix(here) if path.startswith(here) else os.sep.join(path.split(os.sep)[-2:])
    )
