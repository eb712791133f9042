"""Memory that arrays have left: given back to the system, where the C library keeps it for itself."""

import ctypes


def _trim():
    try:
        return ctypes.CDLL(None).malloc_trim  # of glibc; elsewhere there is none
    except (AttributeError, OSError, TypeError):
        return lambda padding: 0


_malloc_trim = _trim()


def give_back() -> None:
    """Lets go of what the C library has free.

    Arrays of many sizes that come and go one by one leave holes between those that stay. Glibc keeps them: in a
    ResNet-50 they are as large as half of the arrays themselves.
    """
    _malloc_trim(0)
