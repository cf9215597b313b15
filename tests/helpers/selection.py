"""Which of many alike cases the quick run leaves out: each is covered by one that it keeps."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A set of parameters that only `pytest --slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)
