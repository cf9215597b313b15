"""Which failure is the cause: symptoms rank below causes, whichever came first."""

from __future__ import annotations

import signal

import pytest

from stretto.launch.supervision.causes import (
    Rank,
    exited,
    first_cause,
    killed,
    left_early,
    signal_name,
)

TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
ABORTED = ["F1129 client.h:86] Terminating process because the JAX distributed service detected"]


def raised(process_id: int, error: str, moment: float):
    return exited(process_id, 1, moment, TRACE + error + "\n")


SYMPTOMS = [
    "jax.errors.JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: Connection closed by peer",
    "jax.errors.JaxRuntimeError: FAILED_PRECONDITION: Buffer Definition Event: Gloo AllReduce"
    " failed: [buffer.cc:72] Read timeout [127.0.0.1]:61590",
    "ValueError: UNKNOWN: Gloo ReduceScatter failed: [buffer.cc:72] Read timeout [::1]:61590",
    "jax.errors.JaxRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Id: a\nmore of it",
    "jax.errors.JaxRuntimeError: INTERNAL: NCCL operation ncclGroupEnd() failed: remote error",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "TimeoutError: process 1 has not come to its first collective with process 0",
]
CAUSES = [
    "KeyError: 'connection closed'",
    "ValueError: the timeout must be positive",
    "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.",
    "jax.errors.JaxRuntimeError: INVALID_ARGUMENT: shapes differ",
]


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_a_cause_comes_before_symptoms_that_were_seen_sooner(symptom, cause):
    failures = [raised(0, symptom, 1.0), raised(2, symptom, 1.1), raised(1, cause, 1.5)]
    assert first_cause(failures).process_id == 1


@pytest.mark.parametrize("symptom", SYMPTOMS)
@pytest.mark.parametrize(
    "cause",
    [exited(1, 3, 2.0), killed(1, signal.SIGABRT, 2.0), killed(1, signal.SIGKILL, 2.0)],
)
def test_an_end_comes_before_symptoms_of_it(symptom, cause):
    assert first_cause([raised(0, symptom, 1.0), cause]) is cause


def test_earliest_failure_is_the_cause():
    assert first_cause([exited(0, 1, 2.0), exited(3, 5, 1.0)]).process_id == 3


def test_crash_comes_before_the_exceptions_it_caused():
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS):
        assert first_cause([exited(0, 1, 1.0), killed(2, number, 1.2)]).process_id == 2


def test_an_abort_by_jax_is_a_consequence_and_another_is_a_cause():
    assert killed(2, signal.SIGABRT, 1.0, ABORTED).rank is Rank.SYMPTOM
    assert killed(2, signal.SIGABRT, 1.0, ["Fatal Python error: Aborted"]).rank is Rank.OWN
    assert killed(2, signal.SIGSEGV, 1.0, ABORTED).rank is Rank.CRASH


def test_a_process_that_left_early_has_no_status_0():
    failure = left_early(1, raised(0, SYMPTOMS[0], 3.0))
    assert (failure.process_id, failure.status) == (1, 1)
    assert "process 0 still waited" in failure.how


def test_statuses_and_words():
    assert exited(1, 3, 0.0).status == 3
    failure = killed(1, signal.SIGKILL, 0.0)
    assert (failure.status, failure.how.split(" (")[0]) == (137, "killed by SIGKILL")
    assert signal_name(64) == "SIGRTMAX"
    assert signal_name(50) == "signal 50"
