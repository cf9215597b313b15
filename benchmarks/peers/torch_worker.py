"""The helper process that times PyTorch's peers: one process per device, requests over a pipe.

Run as a file by an interpreter that has PyTorch, which need not have Stretto: this imports the
standard library, torch and `torch_calls.py` only. `torch_peers.py` starts it. Requests come as
lines of JSON on standard input and each is answered by one line on standard output:

    {"do": "prepare", "peer": "torch", "operation": "all_gather_matmul",
     "operands": [[[64, 32], "bfloat16"], [[32, 16], "bfloat16"]], "sets": 2, "calls": 20}
    {"do": "visit", "id": ..., "samples": ...}
    {"do": "release"}

Answers are {"id": ...}, {"samples": [...]} (microseconds a call, the maximum over processes) or
{"error": ...}.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import multiprocessing.connection
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

REPLY_TIMEOUT_S = 180.0


def _beside(name: str) -> Any:
    """The module in the file `name` beside this one, where Stretto is not installed."""
    path = pathlib.Path(__file__).with_name(name + ".py")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


torch_calls = _beside("torch_calls")


class Rank:
    """One device's process.

    Args:
      rank: this process.
      world: number of processes.
      address: "host:port" of their rendezvous.
    """

    def __init__(self, rank: int, world: int, address: str):
        torch = self.torch = importlib.import_module("torch")
        dist = self.dist = importlib.import_module("torch.distributed")
        self.world = world
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", rank) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if self.on_gpu else "gloo",
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=world,
            **({"device_id": self.device} if self.on_gpu else {}),
        )
        self.group = dist.group.WORLD.group_name
        torch.manual_seed(rank)
        self.prepared: list[tuple[Callable[[int], None], int, int]] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serves a `request`."""
        if request["do"] == "prepare":
            return self._prepare(request)
        if request["do"] == "visit":
            call, sets, calls = self.prepared[request["id"]]
            return {"samples": self._visit(call, sets, calls, request["samples"])}
        self.prepared.clear()
        if self.on_gpu:
            self.torch.cuda.empty_cache()
        return {}

    def _prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        operands = [(shape, getattr(self.torch, name)) for shape, name in request["operands"]]
        sets = [
            [self._operand(shape, dtype, request) for shape, dtype in operands]
            for _ in range(request["sets"])
        ]
        call = self._built(request["peer"], request["operation"], sets)
        call(0)
        self._synchronize()
        self.prepared.append((call, len(sets), request["calls"]))
        return {"id": len(self.prepared) - 1}

    def _operand(self, shape: list[int], dtype: Any, request: dict[str, Any]) -> Any:
        """Random, in symmetric memory where the peer reduces straight from its operand."""
        values = self.torch.randn(*shape, device=self.device, dtype=self.torch.float32).to(dtype)
        if request["peer"] != "torch-symm" or request["operation"] != "all_reduce":
            return values
        symmetric = self._symmetric_memory()
        operand = symmetric.empty(*shape, dtype=dtype, device=self.device)
        symmetric.rendezvous(operand, self.group)
        return operand.copy_(values)

    def _symmetric_memory(self) -> Any:
        if not self.on_gpu:
            raise torch_calls.Unsupported("symmetric memory needs GPUs")
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")
        with contextlib.suppress(Exception):
            symmetric.enable_symm_mem_for_group(self.group)
        return symmetric

    def _built(self, peer: str, operation: str, sets: list[list[Any]]) -> Callable[[int], Any]:
        """A function that calls the peer's operation on set `i`."""
        if peer != "torch-symm":
            return torch_calls.UNFUSED[operation](self, sets)
        self._symmetric_memory()
        if operation not in torch_calls.SYMMETRIC:
            raise torch_calls.Unsupported("PyTorch has no such operation over symmetric memory")
        return torch_calls.SYMMETRIC[operation](self, sets)

    def empty(self, dtype: Any, rows: int, columns: int) -> Any:
        """An array of a type on this device."""
        return self.torch.empty(rows, columns, device=self.device, dtype=dtype)

    @property
    def symm_mem(self) -> Any:
        """PyTorch's kernels over symmetric memory, none of which needs multicast."""
        return self.torch.ops.symm_mem

    def wait(self, out: Any) -> Any:
        """Collectives over symmetric memory run on a stream of their own, which must be awaited."""
        return self.torch.ops._c10d_functional.wait_tensor(out)

    def _visit(
        self, call: Callable[[int], None], sets: int, calls: int, samples: int
    ) -> list[float]:
        """`samples` times of a call in microseconds, from device events; a first one is dropped."""
        marks = [self._mark()]
        for _ in range(samples + 1):
            for index in range(calls):
                call(index % sets)
            marks.append(self._mark())
        self._synchronize()
        pairs = itertools.pairwise(marks[1:])
        return [self._between(start, end) / calls for start, end in pairs]

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) * 1e3 if self.on_gpu else (end - start) * 1e6

    def _synchronize(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()


def rank_main(
    rank: int, world: int, address: str, pipe: multiprocessing.connection.Connection
) -> None:
    """A process's loop: requests in, answers out, errors as answers."""
    try:
        this = Rank(rank, world, address)
        pipe.send({"ready": True})
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})
        return
    while (request := pipe.recv()) is not None:
        try:
            answer = this.answer(request)
        except torch_calls.Unsupported as error:
            answer = {"error": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        pipe.send(answer)


def gather(pipes: list[multiprocessing.connection.Connection]) -> dict[str, Any]:
    """One answer out of all processes': the first error, or the largest time of each sample."""
    answers = []
    deadline = time.monotonic() + REPLY_TIMEOUT_S
    for rank, pipe in enumerate(pipes):
        try:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                return {"error": f"process {rank} gave no answer in {REPLY_TIMEOUT_S:.0f} s"}
            answers.append(pipe.recv())
        except EOFError:
            return {"error": f"process {rank} died"}
    for answer in answers:
        if "error" in answer:
            return answer
    if "samples" in answers[0]:
        columns = zip(*(answer["samples"] for answer in answers), strict=True)
        return {"samples": [max(times) for times in columns]}
    return answers[0]


def main(world: int, address: str) -> None:
    """Starts the processes and passes requests on until standard input ends."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=rank_main, args=(rank, world, address, theirs), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    print(json.dumps(gather(pipes)), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send(request)
        print(json.dumps(gather(pipes)), flush=True)
    for process in processes:
        process.kill()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
