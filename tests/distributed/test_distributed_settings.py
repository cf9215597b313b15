"""Settings of the distributed layer."""

from __future__ import annotations

import pytest

from stretto.distributed import settings


def test_the_limit_of_a_wait_has_a_default(monkeypatch):
    monkeypatch.delenv("STRETTO_WAIT_LIMIT_S", raising=False)
    assert settings.wait_limit_s() == 30


@pytest.mark.parametrize(("text", "seconds"), [("3", 3), ("0.25", 0.25), (" 1e2 ", 100)])
def test_the_limit_of_a_wait(monkeypatch, text, seconds):
    monkeypatch.setenv("STRETTO_WAIT_LIMIT_S", text)
    assert settings.wait_limit_s() == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "inf", "nan", "30s"])
def test_anything_else_is_an_error(monkeypatch, text):
    monkeypatch.setenv("STRETTO_WAIT_LIMIT_S", text)
    with pytest.raises(ValueError, match=r"STRETTO_WAIT_LIMIT_S=.* must be a positive number of s"):
        settings.wait_limit_s()
