"""Keeps the threads that compute a step on a core each.

They wait for each other at every product. Two of them on one core, where the system may put them while a process of low
priority runs on the other, take turns of some milliseconds each, of which one does nothing but wait.
"""

import ctypes
import os
from pathlib import Path

import structlog
import torch

from lorikeet.shard.system.native import CompilerMissing, library

log = structlog.get_logger()
_SOURCE = Path(__file__).with_name("cores.c")


def keep() -> bool:
    """Keep the calling thread and those that compute with it on a core each, where there are as many threads as cores:
    with fewer, the system has cores to choose from. Threads that the caller starts later would be kept beside it, so it
    is to be the last thing before the steps. Whether it was done.
    """
    if not hasattr(os, "sched_getaffinity"):
        return False
    cores = sorted(os.sched_getaffinity(0))
    first = os.getpid() % len(cores)  # not every server's own thread on the same core
    cores = cores[first:] + cores[:first]
    if len(cores) < 2 or torch.get_num_threads() != len(cores):
        return False
    try:
        own = library(_SOURCE)
    except CompilerMissing:
        return False
    failed = own.keep((ctypes.c_int * len(cores))(*cores), len(cores))
    if failed:
        log.warning("threads are not kept on cores", failed=failed)
    return not failed
