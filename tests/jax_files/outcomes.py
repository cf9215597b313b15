"""What came of a test of JAX's in the simulator: the classes of the table, and how to tell them."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence

RIGHT = "right"
REPORTED = "right, with a report"
REFUSED = "refused"
OTHER_WORDS = "in other words"
TAKEN = "taken"
OF_JAX = "of JAX itself"
OTHER_JAX = "of another JAX"
WRONG = "wrong"

# In the order of the table's columns.
CLASSES = {
    RIGHT: "passes, and the simulator has nothing to say",
    REPORTED: "passes, and the simulator reports something besides",
    REFUSED: "the simulator says that it does not do this, and why",
    OTHER_WORDS: "the test wants an error or a printed text, and gets it in other words",
    TAKEN: "the test wants Mosaic GPU to refuse the kernel, and the simulator runs it",
    OF_JAX: "the test looks at machine code, at MLIR, at layouts or at a profile, or wants what"
    " JAX's interpreter forbids and the hardware allows",
    OTHER_JAX: "the test is of another version of JAX than the one installed",
    WRONG: "anything else: wrong numbers, a false alarm, a fault not found, an error",
}

# Tests of what the compiler makes of a kernel, by name. Most run a kernel as well, and pass that.
_COMPILER_TESTS = re.compile(
    r"_ptx|profiler|print_layout|griddepcontrol|line_info|get_arch|mlir_error|ExportTest"
    r"|smem_contiguous|clamped_arrivals|lower_with_abstract_mesh|lowering_error_context"
    r"|more_scratch_uses_less|accumulator_load_with_custom_wait|SemaphoreTest.test_lowering"
    r"|SemaphoreTest.test_basic|WarpSpecializedPipelineTest.test_collective"
)
# A barrier may complete phases that nobody waits for, and an array of them means its first.
_STRICTER_TESTS = re.compile(
    r"completing_barrier_twice|more_barrier_completions_than_waits|not_indexing_multiple"
)
# What the interpreter refuses as Mosaic GPU does; its other errors are faults that it finds.
_REFUSED_BY_BOTH = re.compile(r"incorrect_collective_axes|cant_\w+_twice")
_OTHER_JAX = re.compile(
    r"got an unexpected keyword argument '(manual_ready_barriers|input_output_aliases|smem_ref1)'"
    r"|The 'memory_space' attribute is not available on traced array"
    r"|captures non-scalar array constants|`indices` must not be longer than `shape`"
)
# Mosaic GPU prints an array an element a line; the simulator prints it as a whole.
_PRINTING_TESTS = re.compile(r"test_print_array|test_print_wgmma_tiled_layout")
_NUMBERS = re.compile(r"Mismatched elements|nan location mismatch")
_REFUSED = re.compile(r"UnsupportedKernelError: (.*)")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One test, as a worker ran it.

    Attributes:
      test: its class, name and parameters.
      error: text of the failure, with its traceback; empty if it passed.
      raised: what the simulator raised, in one line; empty if it did not.
      findings: what the simulator reported.
      skipped: why it was skipped; empty if it ran.
      seconds: CPU time that it took.
      asked: the test itself asked whether something was found.
    """

    test: str
    error: str
    raised: str
    findings: tuple[str, ...]
    skipped: str
    seconds: float
    asked: bool

    @property
    def kind(self) -> str:
        """Its class, one of `CLASSES`."""
        if not self.error:
            reported = self.findings and not self.asked
            return REPORTED if reported else RIGHT
        if _OTHER_JAX.search(self.error):
            return OTHER_JAX
        if "does not match" in self.error and self.raised:
            return OTHER_WORDS
        if _REFUSED.search(self.error):
            return REFUSED
        is_of_jax = _COMPILER_TESTS.search(self.test) or _STRICTER_TESTS.search(self.test)
        if is_of_jax and not self.raised and not _NUMBERS.search(self.error):
            return OF_JAX
        if re.search(r"(Error|Exception) not raised", self.error):
            return self._kind_of_no_error()
        return OTHER_WORDS if _PRINTING_TESTS.search(self.test) else WRONG

    def _kind_of_no_error(self) -> str:
        """The class of a test that wants an error, and gets none."""
        if "Interpret" not in self.test or _REFUSED_BY_BOTH.search(self.test):
            return TAKEN
        return OTHER_WORDS if self.findings else WRONG

    @property
    def reason(self) -> str:
        """In a few words, why it is not simply right."""
        if self.kind == REFUSED:
            text = re.sub(r"kernel \S+: ", "", _REFUSED.findall(self.error)[-1])
            return re.sub(r",? \('\w+' used at .*|, used at .*|;.*", "", text)
        if self.error:
            lines = [line for line in self.error.splitlines() if line.strip()]
            return lines[-1][:160]
        return re.sub(r"\d+", "N", self.findings[0].splitlines()[0][:80]) if self.findings else ""


def count(outcomes: Sequence[Outcome]) -> collections.Counter[str]:
    """How many of each class ran."""
    return collections.Counter(outcome.kind for outcome in outcomes if not outcome.skipped)
