"""The number of C library heaps from which the threads of a run allocate."""

import os
import platform
import subprocess
import sys

import pytest

from axon_dist.core.heaps import MOST_HEAPS

COUNT = """
import ctypes, sys, threading
from axon_dist.core.heaps import limit_heaps

if sys.argv[1] == "limited":
    assert limit_heaps()
C = ctypes.CDLL(None)
C.malloc.restype, C.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
together = threading.Barrier(9)

def allocate():
    C.malloc(1000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
together.wait()
C.fdopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(C.fdopen(1, b"w"))
C.malloc_info(0, out)
C.fflush(out)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a limit of glibc")
def test_threads_share_few_heaps():
    def heaps(name, **more):
        env = {**os.environ, **more}
        arguments = [sys.executable, "-c", COUNT, name]
        return subprocess.check_output(arguments, env=env, text=True).count("<heap nr=")

    env = {"JAX_PLATFORMS": "cpu"}
    assert heaps("limited", **env) <= MOST_HEAPS < heaps("all", **env)
    # The user's own limit stays.
    assert heaps("limited", MALLOC_ARENA_MAX="4", **env) == 4
