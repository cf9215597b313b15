"""The errors that Stretto raises, before anything is launched unless stated otherwise."""


class StrettoError(Exception):
    """Base of the errors that are neither a caller's mistake nor an unsupported case."""


class BackendUnavailableError(StrettoError, ValueError):
    """The backend that the caller chose, such as "pallas", cannot serve the call."""


class KernelTimeoutError(StrettoError, RuntimeError):
    """A wait in a kernel passed its limit: a peer's signal is missing. Raised after the launch."""
