"""The threads that write output: whatever happens in one, nothing waits for it for ever."""

from __future__ import annotations

import pytest

from stretto.launch.supervision.console import Console
from stretto.launch.supervision.outlet import Outlet, Piece


def test_an_outlet_goes_on_after_an_error():
    written = []

    def write(pieces, now):
        written.extend(piece.data for piece in pieces)
        if b"bad" in written[-1:]:
            raise ValueError("the first fault")

    def fail():
        raise KeyError("the second fault")

    outlet = Outlet(write, lambda now: False, lambda: None)
    outlet.put(Piece(0, "stdout", b"bad"))
    assert outlet.wait(30)
    outlet.put(fail)
    outlet.put(Piece(0, "stdout", b"good"))
    assert outlet.wait(30)
    assert written == [b"bad", b"good"] and outlet.taken[0] > 0
    assert str(outlet.error) == "the first fault"
    outlet.end()


def test_a_fault_of_the_console_ends_the_job_and_is_told(capfd, monkeypatch):
    console = Console(1, None)
    monkeypatch.setattr(console._terminal, "say", lambda text: 1 / 0)
    console.say("lost")
    assert console.drain(30)
    with pytest.raises(ZeroDivisionError):
        console.check()
    console.close()
    assert "some output was lost: ZeroDivisionError" in capfd.readouterr().err


def test_a_message_may_have_any_text(capfdbinary):
    """What came as bytes that are no text, and what no encoding has."""
    console = Console(1, None)
    console.say("caf\udce9, \ud800")
    console.say("b\xe4r \udce9")
    assert console.drain(30)
    console.check()
    console.close()
    assert capfdbinary.readouterr().err.splitlines() == [
        b"caf\\udce9, \\ud800",
        b"b\xc3\xa4r \xe9",
    ]
