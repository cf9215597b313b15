"""Reports of waits that passed their limit: what a kernel writes, and what the host makes of it."""

from __future__ import annotations

import ctypes
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from stretto.distributed.errors import KernelTimeoutError, StrettoError
from stretto.distributed.memory import mailbox
from stretto.distributed.memory.mailbox import Site

SITE = Site(kernel="all_gather_matmul", semaphore="received", limit_s=2.5)


@pytest.fixture
def page(monkeypatch):
    """A page in ordinary memory, in place of the one that is shared with GPUs."""
    words = (ctypes.c_int32 * (mailbox.PAGE_BYTES // 4))()
    monkeypatch.setattr(mailbox, "_pages", [words])
    return words


def write(page, device, *, block=(5, 0, 0), wanted=4, seen=3, indices=(), site=SITE):
    """What the PTX of a late wait stores."""
    record = [mailbox.register(site), device, *block, wanted, seen, len(indices), *indices]
    start = device * mailbox.RECORD_WORDS
    page[start + 1 : start + 1 + len(record)] = record
    page[start] = mailbox.WRITTEN


def test_an_empty_page_has_no_reports(page):
    assert mailbox.read() == []


def test_without_gpus_there_is_no_page():
    assert mailbox.read() == []


def test_a_report_names_everything(page):
    write(page, 3, block=(17, 1, 0), wanted=8, seen=7, indices=(2, 40))
    assert mailbox.read() == [
        "kernel all_gather_matmul gave up after 2.5 s: process 0, device 3, block (17, 1, 0) waits"
        " for semaphore received[2][40] >= 8, which is 7"
    ]


def test_a_report_of_a_device_that_does_not_start(page):
    site = Site(kernel="all_reduce", semaphore="opening", limit_s=1800, awaits_start=True)
    write(page, 0, wanted=1, seen=0, indices=(3,), site=site)
    (line,) = mailbox.read()
    assert line.endswith("opening[3] >= 1, which is 0: GPU 3 of this node has not come to it")


def test_every_device_has_a_record_of_its_own(page):
    for device in (0, 5, mailbox.MAX_DEVICES - 1):
        write(page, device)
    found = mailbox.read()
    assert [line.split("device ")[1].split(",")[0] for line in found] == ["0", "5", "63"]


def test_a_record_that_is_not_finished_is_not_read(page):
    write(page, 1)
    page[mailbox.RECORD_WORDS] = 0
    assert mailbox.read() == []


def test_a_record_fits_its_place():
    fixed = len(mailbox._FIELDS)
    assert fixed + mailbox.MAX_INDICES <= mailbox.RECORD_WORDS
    assert mailbox.MAX_DEVICES * mailbox.RECORD_BYTES == mailbox.PAGE_BYTES


def test_sites_have_keys_that_differ_and_last():
    other = Site(kernel="all_gather_matmul", semaphore="released", limit_s=2.5)
    assert SITE.key != other.key
    assert SITE.key == zlib.crc32(b"all_gather_matmul/received") & 0x7FFF_FFFF  # in any process
    assert SITE.key == Site(kernel=SITE.kernel, semaphore=SITE.semaphore, limit_s=9).key
    assert 0 <= SITE.key < 2**31  # A word of the record, as a C int reads it.


def test_an_unknown_site_is_still_reported(page):
    write(page, 0)
    page[1] = 12345
    assert "kernel ? gave up" in mailbox.read()[0]


def test_jax_errors_are_explained(page):
    failure = jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_LAUNCH_FAILED")
    assert mailbox.explain(failure) is None
    write(page, 1, seen=0)
    explained = mailbox.explain(failure)
    assert isinstance(explained, KernelTimeoutError) and isinstance(explained, StrettoError)
    assert "all_gather_matmul gave up" in str(explained)
    assert mailbox.explain(ValueError("something else")) is None


def test_the_hook_shows_the_report_last(page, capsys):
    shown = []
    write(page, 2)
    failure = jax.errors.JaxRuntimeError("INTERNAL")
    mailbox._excepthook(lambda *args: shown.append(args), type(failure), failure, None)
    ((kind, error, _),) = shown
    assert kind is KernelTimeoutError and "device 2" in str(error)
    assert "JaxRuntimeError" in capsys.readouterr().err


def test_the_hook_leaves_other_errors_alone(page):
    shown = []
    error = ValueError("mine")
    mailbox._excepthook(lambda *args: shown.append(args), ValueError, error, None)
    assert shown == [(ValueError, error, None)]


def test_threads_that_ask_at_once_get_one_page(monkeypatch):
    """A second page would lie elsewhere, and the kernels of one thread would have its address."""
    made = []

    def slowly():
        made.append(len(made))
        time.sleep(0.05)
        return len(made), None

    monkeypatch.setattr(mailbox, "_map", slowly)
    mailbox._made.cache_clear()
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: mailbox.address(), range(8)))
    finally:
        mailbox._made.cache_clear()
    assert made == [0] and set(found) == {1}


def test_the_address_is_the_same_every_time_and_can_be_written():
    """Also without GPUs: the address is compiled into kernels."""
    address = mailbox.address()
    assert address == mailbox.address()
    words = (ctypes.c_int32 * (mailbox.PAGE_BYTES // 4)).from_address(address)
    words[-1] = 7
    assert np.array(words)[-1] == 7
    words[-1] = 0
