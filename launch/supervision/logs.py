"""A log file a process, in a folder a run."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from stretto.launch.errors import LaunchError
from stretto.launch.supervision.outlet import Piece, write_all
from stretto.launch.supervision.page import Page

_LATEST = "latest"


def run_folder(log_dir: Path) -> Path:
    """A new folder in ``log_dir`` for the logs of one run, which ``latest`` there leads to.

    It is named for the time, such as ``20261129-141503``.

    Raises:
      LaunchError: it cannot be made.
    """
    name = time.strftime("%Y%m%d-%H%M%S")
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        folder = _new_folder(log_dir, name)
    except OSError as error:
        raise LaunchError(
            f"--log-dir {log_dir} cannot be written ({error.strerror}); choose another folder"
        ) from None
    try:
        link = log_dir / f".{_LATEST}-{folder.name}"
        link.symlink_to(folder.name)
        link.replace(log_dir / _LATEST)
    except OSError:
        pass  # a file system without links, or a file of that name
    return folder


def _new_folder(log_dir: Path, name: str) -> Path:
    number = 1
    while True:
        folder = log_dir / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


class Logs:
    """The files of one attempt.

    Args:
      folder: where they go.
      attempt: 0, or the number of the restart, which then is part of their names.
      say: called with one line if a file cannot be written; the job continues without it.
    """

    def __init__(self, folder: Path, attempt: int, say: Callable[[str], None]):
        self._folder = folder
        self._suffix = f".restart{attempt}.log" if attempt else ".log"
        self._say = say
        self._files: dict[int, int | None] = {}
        self._pages: dict[int, Page] = {}
        self._unfinished: set[int] = set()  # processes whose page may hold something back
        self._complained = False

    def file_of(self, process_id: int) -> Path | None:
        """The file that holds a process's output; None if it wrote nothing so far."""
        return self._path(process_id) if self._files.get(process_id) is not None else None

    def _path(self, process_id: int) -> Path:
        return self._folder / f"process-{process_id}{self._suffix}"

    def write(self, pieces: Sequence[Piece], now: float) -> None:
        """Write the pieces to the files of their processes."""
        for piece in pieces:
            page = self._pages.setdefault(piece.process_id, Page())
            if piece.data is None:
                self._append(piece.process_id, page.end(piece.stream))
            else:
                data = page.add(piece.stream, b"", piece.data, now)
                self._append(piece.process_id, data)
            self._unfinished.add(piece.process_id)

    def write_due(self, now: float) -> bool:
        """Write lines that are not complete whose source has paused; whether more will be due."""
        for process_id in self._unfinished:
            self._append(process_id, self._pages[process_id].due(now))
        self._unfinished = {i for i in self._unfinished if self._pages[i].holds_back}
        return bool(self._unfinished)

    def close(self) -> None:
        """Close the files."""
        for fd in self._files.values():
            if fd is not None:
                os.close(fd)

    def _append(self, process_id: int, data: bytes) -> None:
        if not data:
            return
        try:
            if process_id not in self._files:
                self._files[process_id] = None
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._files[process_id] = os.open(self._path(process_id), flags, 0o666)
            fd = self._files[process_id]
            if fd is not None:
                write_all(fd, data)
        except OSError as error:
            if not self._complained:
                self._complained = True
                what = f"{self._path(process_id)} cannot be written ({error.strerror})"
                self._say(f"stretto: {what}; the job continues, its log has gaps")
