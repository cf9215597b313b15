"""Errors of a kernel that are found before it runs: found once, reported at each launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stretto.distributed.simulator.reports.report import Finding, Report
from stretto.distributed.sites import UNKNOWN_SITE, Site


@dataclass(frozen=True)
class Flaw:
    """One thing that is wrong with a kernel.

    Attributes:
      kind: of the finding.
      message: the whole story.
      site: where it is, if that is known.
    """

    kind: str
    message: str
    site: Site = UNKNOWN_SITE

    def tell(self, report: Report) -> None:
        """Adds the flaw to what a launch has found."""
        key = (self.kind, self.message)
        sites = (self.site,) if self.site.line else ()
        report.add(Finding(kind=self.kind, key=key, message=self.message, sites=sites))


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, each before those of the jaxprs within it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    for param in eqn.params.values():
        for value in param if isinstance(param, tuple | list) else (param,):
            if hasattr(getattr(value, "jaxpr", value), "eqns"):
                yield value
