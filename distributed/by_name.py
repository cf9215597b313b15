"""Arguments that are passed by name: what a call says that passes one without."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

_BY_POSITION = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


def by_name[F: Callable[..., Any]](fun: F) -> F:
    """`fun`, a function or a class, whose error for too many positional arguments names the others.

    Python's own counts them, and counts `self` among them.

    Raises:
      TypeError: a call passes more than the positional ones without a name.
    """
    if isinstance(fun, type):
        initial: Any = fun.__init__
        setattr(fun, "__init__", _checked(initial, fun.__qualname__))  # noqa: B010 (it is a type)
        return cast(F, fun)
    return _checked(fun, fun.__qualname__)


def _checked(fun: Callable[..., Any], name: str) -> Any:
    parameters = inspect.signature(fun).parameters.values()
    most = sum(p.kind in _BY_POSITION for p in parameters)
    named = [p.name for p in parameters if p.kind == inspect.Parameter.KEYWORD_ONLY]

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        check(name, args[most:], named)
        return fun(*args, **kwargs)

    return call


def check(name: str, unnamed: Sequence[Any], named: Sequence[str]) -> None:
    """The same for a function that takes `*unnamed: Never`, and so is in no wrapper.

    JAX keeps the innermost frames of a kernel's operation only, of which a wrapper would be one.
    """
    if unnamed:
        values = ", ".join(f"{value!r:.40}" for value in unnamed)
        how = ", ".join(f"{one}=..." for one in named)
        raise TypeError(f"{name}: {values} must be passed by name, as one of {how}")
