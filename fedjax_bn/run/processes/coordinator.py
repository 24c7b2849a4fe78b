"""The address at which processes meet, process 0's, and what JAX does where nobody is there."""

import ctypes
import signal
import socket


def reach(address: str) -> None:
    """Connects to HOST:PORT and leaves.

    Raises:
      OSError: nobody listens there; TimeoutError where that is not known after 5 s.
      OverflowError: there is no such port.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()


def abort_late() -> None:
    """Lets this process live for 6 s after an abort, in which it can say why.

    JAX aborts it as soon as the connection to process 0 is lost, and takes no function to call in
    place of that. SIGABRT calls C's `sleep`, which takes the signal's number, 6, for seconds.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    library.signal.restype = ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))
