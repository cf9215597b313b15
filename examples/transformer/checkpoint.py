"""Checkpoints through Orbax: the whole state, and what it was trained on.

Every run has a folder of its own, `ROOT/NAME-1`, `ROOT/NAME-2`, ..., so none overwrites another's.
Arrays are restored to the mesh of the run that reads them, which may be another one than before.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from step import TrainState


def run_folder(root: Path, name: str, *, resume: bool) -> Path:
    """The newest run's folder if `resume`, else a new one; the same on every process.

    Every process must call it. A resumed run that finds no folder gets a new one. It is made at
    once, so that a job that crashes before its first checkpoint finds its own on a restart.
    """
    numbers = [
        int(path.name.removeprefix(f"{name}-"))
        for path in root.glob(f"{name}-*")
        if path.name.removeprefix(f"{name}-").isdecimal()
    ]
    newest = max(numbers, default=0)
    number = newest if resume and newest else newest + 1
    if jax.process_index() == 0:
        (root / f"{name}-{number}").mkdir(parents=True, exist_ok=True)
    if jax.process_count() > 1:  # others may look when the folder is there already
        number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    return root.absolute() / f"{name}-{number}"


def read(
    folder: Path, shapes_of: Callable[[dict[str, Any]], TrainState]
) -> tuple[dict[str, Any], TrainState]:
    """What a run is made of, and its newest checkpoint; leaves the folder as it is.

    Args:
      folder: of a run, which may still go on.
      shapes_of: of what the run is made of, makes the arrays' shapes, with their shardings.

    Raises:
      ValueError: there is no checkpoint.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist; pass the folder of a run of train.py.")
    options = ocp.CheckpointManagerOptions(read_only=True, create=False, save_interval_steps=0)
    with contextlib.closing(ocp.CheckpointManager(folder.absolute(), options=options)) as manager:
        step = manager.latest_step()
        if step is None:
            raise ValueError(f"{folder} holds no checkpoint; pass the folder of a run of train.py.")
        args = ocp.args.Composite(about=ocp.args.JsonRestore())
        about = manager.restore(step, args=args)["about"]
        args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes_of(about)))
        return about, manager.restore(step, args=args)["state"]


class Checkpoints:
    """The checkpoints of one run; the newest two are kept. Every process makes the same calls.

    A checkpoint is written under another name, and renamed when it is whole, so what a crash leaves
    half written is no checkpoint. The next run removes it: call `close`, whatever a run ends with,
    lest it removes one that is still being written.

    Args:
      folder: of the run, on a file system that all processes share.
      about: what the run is made of, as JSON has it. Restoring checks that it is the same.
    """

    def __init__(self, folder: Path, about: dict[str, Any]):
        self.folder = folder
        self._about = about
        _remove_unfinished(folder)
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(folder, options=options)

    def newest(self) -> int | None:
        """The step of the newest checkpoint, or None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Writes `state` as that after `step` steps, while training goes on."""
        if step == self.newest():
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(self._about)
        )
        self._manager.save(step, args=args)

    def restore(self, shapes: TrainState) -> TrainState:
        """The newest checkpoint, bit for bit, split over devices as `shapes` says.

        Raises:
          ValueError: it is of a run that was made of other things.
        """
        about = ocp.args.Composite(about=ocp.args.JsonRestore())
        before = self._manager.restore(self.newest(), args=about)["about"]
        for name in sorted(before.keys() | self._about.keys()):
            was, now = before.get(name), self._about.get(name)
            if was != now:
                raise ValueError(
                    f"{self.folder} was trained with {name}={was!r} and this run has {now!r};"
                    " pass the same, or start anew without --resume."
                )
        args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        return self._manager.restore(self.newest(), args=args)["state"]

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.close()


def _remove_unfinished(folder: Path) -> None:
    """Removes what a crash has left half written, before anything else is done with the folder.

    Orbax has a thread for this (`cleanup_tmp_directories`), which only a save waits for: a run that
    makes none would end while it still removes.
    """
    if jax.process_index() == 0:
        for path in folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
            shutil.rmtree(path)
