"""A job of many processes has the open files that it needs, or says what is in its way."""

from __future__ import annotations

import resource

import pytest

from stretto.launch.errors import LaunchError
from stretto.launch.supervision.descriptors import make_room


@pytest.fixture
def limits(monkeypatch):
    """`limits(soft, hard)`: the limits of a stand-in; a list of what was set."""

    def limits(soft: int, hard: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda _, pair: found.append(pair))
        return found

    return limits


@pytest.mark.parametrize("hard", [4096, resource.RLIM_INFINITY])
def test_limit_is_raised_as_far_as_needed(limits, hard):
    found = limits(1024, hard)
    make_room(1000)
    assert found == [(3128, hard)]


@pytest.mark.parametrize("soft", [1024, resource.RLIM_INFINITY])
def test_limit_that_will_do_is_left_alone(limits, soft):
    found = limits(soft, resource.RLIM_INFINITY)
    make_room(100)
    assert not found


def test_too_low_a_hard_limit_is_told(limits):
    limits(1024, 1024)
    with pytest.raises(LaunchError, match="1000 processes need 3128 open files here, and 1024 are"):
        make_room(1000)
