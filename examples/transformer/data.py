"""Real text on any machine, with no download: the sources of Python's standard library, as bytes.

Which bytes a step trains on follows from the seed and the step's number alone, so a run can go on
at any step, and it is the same on every mesh: each data-parallel group takes its part of one batch.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

HELD_OUT = 20  # every so manieth file is for validation
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Corpus(NamedTuple):
    """Bytes to learn from and bytes to be judged by, uint8, and what identifies both."""

    training: np.ndarray
    validation: np.ndarray
    digest: str


class Batch(NamedTuple):
    """Bytes, and the byte after each: int32 `[batch, sequence]`."""

    tokens: np.ndarray
    targets: np.ndarray


def load_corpus(folder: Path | None = None) -> Corpus:
    """All Python files below `folder`, by default the standard library's; tests left out.

    Raises:
      FileNotFoundError: there are too few sources, as where Python comes without its own.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path for path in folder.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(folder).parts)
    )
    if len(files) < HELD_OUT:
        raise FileNotFoundError(
            f"{folder} has {len(files)} Python files and at least {HELD_OUT} are needed; install"
            " the standard library's sources, or use a Python from uv or python.org."
        )
    training = b"\n".join(path.read_bytes() for i, path in enumerate(files) if i % HELD_OUT)
    validation = b"\n".join(path.read_bytes() for path in files[::HELD_OUT])
    digest = hashlib.sha256(training + validation).hexdigest()[:16]
    return Corpus(np.frombuffer(training, np.uint8), np.frombuffer(validation, np.uint8), digest)


def training_batch(corpus: Corpus, step: int, batch: int, sequence: int, seed: int) -> Batch:
    """The batch of a step: windows at places drawn for (`seed`, `step`)."""
    places = np.random.default_rng((seed, step))
    starts = places.integers(len(corpus.training) - sequence, size=batch)
    return _windows(corpus.training, starts, sequence)


def validation_batch(corpus: Corpus, index: int, count: int, batch: int, sequence: int) -> Batch:
    """Batch `index` of `count`: windows spread evenly over the validation text, the same always."""
    last = len(corpus.validation) - sequence - 1
    starts = np.linspace(0, last, count * batch).astype(int)
    return _windows(corpus.validation, starts[index::count], sequence)


def _windows(text: np.ndarray, starts: np.ndarray, sequence: int) -> Batch:
    rows = text[starts[:, None] + np.arange(sequence + 1)].astype(np.int32)
    return Batch(rows[:, :-1], rows[:, 1:])
