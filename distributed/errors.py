"""The errors that Stretto raises, before anything is launched unless they say otherwise."""


class StrettoError(Exception):
    """Base of the errors that are neither a caller's mistake nor something unbuilt."""


class BackendUnavailableError(StrettoError, ValueError):
    """`backend="pallas"` (or another explicit backend) was asked for and cannot serve the call."""


class KernelTimeoutError(StrettoError, RuntimeError):
    """A wait in a kernel passed its limit: a peer's signal never came. Raised after the launch."""
