"""Settings of the distributed layer."""

from __future__ import annotations

import math
import re

import jax
import pytest

from stretto.distributed import settings

LIMITS = {
    "STRETTO_WAIT_LIMIT_S": settings.wait_limit_s,
    "STRETTO_START_LIMIT_S": settings.start_limit_s,
}
each_limit = pytest.mark.parametrize("variable", LIMITS)


def test_limits_have_defaults(monkeypatch):
    for variable in LIMITS:
        monkeypatch.delenv(variable, raising=False)
    assert settings.wait_limit_s() == 30 and settings.start_limit_s() == 1800


@each_limit
@pytest.mark.parametrize(("text", "seconds"), [("3", 3), ("0.25", 0.25), (" 1e2 ", 100)])
def test_a_limit(monkeypatch, variable, text, seconds):
    monkeypatch.setenv(variable, text)
    assert LIMITS[variable]() == seconds


@each_limit
@pytest.mark.parametrize("text", ["", "-1", "inf", "nan", "30s", "1e20"])
def test_anything_else_is_an_error(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=rf"{variable}=.* number of seconds to 1000000000"):
        LIMITS[variable]()


@pytest.mark.parametrize(
    ("variable", "danger"),
    [
        ("STRETTO_WAIT_LIMIT_S", "a signal that never comes"),
        ("STRETTO_START_LIMIT_S", "a device that never starts one"),
    ],
)
def test_no_limit_is_warned_of(monkeypatch, variable, danger):
    monkeypatch.setenv(variable, "0")
    with pytest.warns(UserWarning, match=f"{danger} hangs the job"):
        assert LIMITS[variable]() == math.inf


def test_a_limit_for_what_is_traced_inside(monkeypatch):
    monkeypatch.setenv("STRETTO_WAIT_LIMIT_S", "7")

    @jax.jit
    def traced(x):
        return x + settings.wait_limit_s()

    with settings.wait_limit(2):
        assert traced(0) == 2
        with settings.wait_limit(0):
            assert settings.wait_limit_s() == math.inf
    assert traced(0) == 7  # Not what was traced before.
    for beyond in (-1, 1e20):
        with pytest.raises(ValueError, match=re.escape(f"seconds={beyond}")):
            settings.wait_limit(beyond)


@pytest.mark.parametrize("text", ["", "0", "-1", "2.0", "two"])
def test_devices_per_node(monkeypatch, text):
    monkeypatch.delenv("STRETTO_DEVICES_PER_NODE", raising=False)
    assert settings.devices_per_node() is None
    monkeypatch.setenv("STRETTO_DEVICES_PER_NODE", "4")
    assert settings.devices_per_node() == 4
    monkeypatch.setenv("STRETTO_DEVICES_PER_NODE", text)
    with pytest.raises(ValueError, match=r"STRETTO_DEVICES_PER_NODE=.* whole number of 1 or more;"):
        settings.devices_per_node()


@pytest.mark.parametrize("text", ["", "-1", "few"])
def test_free_multiprocessors(monkeypatch, text):
    monkeypatch.delenv("STRETTO_FREE_MULTIPROCESSORS", raising=False)
    assert settings.free_multiprocessors() is None
    monkeypatch.setenv("STRETTO_FREE_MULTIPROCESSORS", "0")
    assert settings.free_multiprocessors() == 0
    monkeypatch.setenv("STRETTO_FREE_MULTIPROCESSORS", text)
    with pytest.raises(ValueError, match=r"STRETTO_FREE_MULTIPROCESSORS=.* number of 0 or more;"):
        settings.free_multiprocessors()


def test_nodes_for_what_is_traced_inside(monkeypatch):
    monkeypatch.setenv("STRETTO_DEVICES_PER_NODE", "4")

    @jax.jit
    def traced(x):
        return x + settings.devices_per_node()

    with settings.nodes_of(2):
        assert traced(0) == 2
    assert traced(0) == 4
    with pytest.raises(ValueError, match="devices=0 must be at least 1"):
        settings.nodes_of(0)
