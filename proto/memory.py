"""Memory that the C library keeps."""

import ctypes


def return_freed_memory() -> bool:
    """Return freed memory to the system, which the C library keeps where it lies between blocks in use. Takes
    milliseconds, without the GIL. Returns whether the library can.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    return trim is not None
