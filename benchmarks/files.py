"""Files that commands read and write: whole or not at all, with an error of one line."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import tempfile

from stretto.benchmarks.errors import BenchmarkError


def write_whole(path: pathlib.Path, data: bytes) -> None:
    """Writes a file, and the folders above it. What was there stays if that fails.

    Raises:
      BenchmarkError: it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        _make_folder(path.parent)
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise _unwritable(str(path), error) from None


def check_writable(option: str, path: pathlib.Path | None) -> None:
    """Raises BenchmarkError if the file that an option names could not be written now.

    To be called before anything is measured. Makes the folders above the file. None is fine.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        _make_folder(path.parent)
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"x")
    except OSError as error:
        raise _unwritable(f"{option} {path}", error) from None


def read_text(path: pathlib.Path, way_out: str) -> str:
    """A text file's content; BenchmarkError with the way out if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"{path}: {error.strerror}; {way_out}.") from None
    except UnicodeDecodeError:
        raise BenchmarkError(f"{path}: it is no text (UTF-8); {way_out}.") from None


def holds(path: pathlib.Path, text: str) -> bool:
    """Whether a file is there and holds this text."""
    try:
        return path.read_bytes() == text.encode()
    except OSError:
        return False


def _make_folder(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # as a file
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None


def _unwritable(name: str, error: OSError) -> BenchmarkError:
    return BenchmarkError(
        f"{name} cannot be written ({error.strerror}); make room there, or name another file."
    )
