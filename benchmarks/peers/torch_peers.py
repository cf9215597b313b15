"""PyTorch's peers, timed by a helper process that takes its turn with the others."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.errors import UnavailableError
from stretto.kernels.operation import Operation
from stretto.kernels.operations import collectives, matmuls
from stretto.launch import environment

ANSWER_TIMEOUT_S = 240.0
_WORKER = pathlib.Path(__file__).with_name("torch_worker.py")


# What `torch_worker.py` calls the operations that it has.
SERVED: dict[Operation, str] = {
    matmuls.GATHERS["m"]: "all_gather_matmul",
    matmuls.MATMUL_REDUCE_SCATTER: "matmul_reduce_scatter",
    matmuls.MATMUL_ALL_REDUCE: "matmul_all_reduce",
    collectives.ALL_GATHER: "all_gather",
    collectives.REDUCE_SCATTER: "reduce_scatter",
    collectives.ALL_REDUCE: "all_reduce",
    collectives.ALL_TO_ALL: "all_to_all",
    matmuls.SCALED_GATHER["row"]: "all_gather_scaled_matmul",
    matmuls.SCALED_REDUCE_SCATTER["row"]: "scaled_matmul_reduce_scatter",
    matmuls.SCALED_ALL_REDUCE["row"]: "scaled_matmul_all_reduce",
}


class TorchHelper:
    """The helper process, started when first needed, for one number of devices at a time.

    It runs without NVLink multicast, as all of this package does by default.

    Args:
      python: the interpreter that has PyTorch; by default this one.
      on_gpu: whether to time on GPUs. On a CPU, PyTorch runs over gloo, to try the path out.
    """

    def __init__(self, python: str | None, on_gpu: bool):
        self._python = python or sys.executable
        self._is_other = python is not None
        self._on_gpu = on_gpu
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()
        self._log: IO[bytes] | None = None
        self._devices = 0
        self._is_starting = False
        self._case: Case | None = None
        self._broken: dict[int, str] = {}

    def timer(self, peer: str, case: Case, sets: int, rounds: int) -> TorchTimer:
        """A timer of `peer`, "torch" or "torch-symm", of one of the operations `SERVED`.

        Args:
          peer: the peer's name.
          case: the problem.
          sets: of operands.
          rounds: that a run goes through all sets.

        Raises:
          UnavailableError: there is none.
        """
        self.start(case.devices)
        self._await_start(case.devices)
        if self._case is not case:
            self.ask({"do": "release"})
            self._case = case
        calls = sets * rounds
        request = {
            "do": "prepare",
            "peer": peer,
            "operation": SERVED[case.operation],
            "operands": [(x.shape, x.dtype or case.dtype) for x in case.operands],
            "sets": sets,
            "calls": calls,
        }
        return TorchTimer(self, self.ask(request)["id"], calls)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The helper's answer; UnavailableError if it is an error, or does not come."""
        process = self._process
        if process is None or process.stdin is None:
            raise UnavailableError("PyTorch's helper process has ended")
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except OSError:
            raise UnavailableError(self._ended("PyTorch's helper process ended")) from None
        return self._next_answer()

    def close(self, patience_s: float = 10.0) -> None:
        """Ends the helper and its children, by force after `patience_s` seconds."""
        process, self._process, self._case = self._process, None, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            # The helper leads a group of its own, so that its children go with it.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def start(self, devices: int) -> None:
        """Starts the helper for `devices` devices, unless it is there; returns at once.

        Importing PyTorch takes a while, in which others may compile.
        """
        if (self._process is not None and self._devices == devices) or self._obstacle(devices):
            return
        self.close()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed by close()
        self._answers = queue.Queue()
        self._process = subprocess.Popen(
            [self._python, "-P", str(_WORKER), str(devices), f"127.0.0.1:{_free_port()}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env={
                "NCCL_NVLS_ENABLE": "0",
                **environment.current(),
                "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            },
        )
        self._devices = devices
        self._is_starting = True
        threading.Thread(
            target=self._read, args=(self._process, self._answers), daemon=True
        ).start()

    def _obstacle(self, devices: int) -> str:
        """Why there can be no helper, empty if there can."""
        if devices in self._broken:
            return self._broken[devices]
        if not self._is_other and importlib.util.find_spec("torch") is None:
            return "PyTorch is not installed (--torch-python names another Python)"
        if shutil.which(self._python) is None:
            return f"{self._python} is not an interpreter"
        return ""

    def _await_start(self, devices: int) -> None:
        """Returns when the helper that was started is ready; UnavailableError if it never is."""
        if obstacle := self._obstacle(devices):
            raise UnavailableError(obstacle)
        if not self._is_starting:
            return
        self._is_starting = False
        try:
            self._next_answer()
        except UnavailableError as error:
            self._broken[devices] = f"PyTorch's helper did not start: {error}"
            self.close()
            raise UnavailableError(self._broken[devices]) from None

    @staticmethod
    def _read(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
        """Passes lines on from a thread of its own, so that waiting for one can have a limit."""
        if process.stdout is not None:
            for line in process.stdout:
                answers.put(line)
        answers.put("")

    def _next_answer(self) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=ANSWER_TIMEOUT_S)
        except queue.Empty:
            self.close(patience_s=0.0)
            raise UnavailableError(f"no answer in {ANSWER_TIMEOUT_S:.0f} s") from None
        if not line:
            raise UnavailableError(self._ended("PyTorch's helper process ended"))
        answer = json.loads(line)
        if "error" in answer:
            raise UnavailableError(answer["error"].strip().splitlines()[0])
        return answer

    def _ended(self, what: str) -> str:
        """`what` with the last line that the helper wrote to its standard error."""
        last = ""
        if self._log is not None:
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            last = f": {lines[-1]}" if lines else ""
        self.close()
        return what + last


class TorchTimer:
    """Times one prepared peer in the helper process."""

    def __init__(self, helper: TorchHelper, identity: int, calls: int):
        self._helper = helper
        self._identity = identity
        self._calls = calls

    @property
    def calls(self) -> int:
        """Calls that one sample is the mean of."""
        return self._calls

    @property
    def temp_bytes(self) -> int | None:
        """Nobody knows."""
        return None

    def visit(self, samples: int) -> list[float]:
        """`samples` times of one call, in microseconds, the maximum over processes."""
        request = {"do": "visit", "id": self._identity, "samples": samples}
        return self._helper.ask(request)["samples"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
