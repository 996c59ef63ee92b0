"""Pins the threads that compute a step to one core each.

These threads wait for each other at every product. If the system puts two of them on one core, as it may while another
process of low priority runs on the other, they take turns of some milliseconds each, and the waiting one's is wasted.
"""

import ctypes
import os
from pathlib import Path

import structlog
import torch

from lorikeet.shard.system.native import CompilerMissing, library

log = structlog.get_logger()
_SOURCE = Path(__file__).with_name("cores.c")


def pin_threads() -> bool:
    """Pin the calling thread and its OpenMP team to one core each, if there are as many threads as cores; with fewer,
    the system chooses better. Threads that the caller starts later inherit its core, so call this right before the
    steps. Returns whether the threads are pinned.
    """
    if not hasattr(os, "sched_getaffinity"):
        return False
    cores = sorted(os.sched_getaffinity(0))
    first = os.getpid() % len(cores)  # the main threads of several servers get different cores
    cores = cores[first:] + cores[:first]
    if len(cores) < 2 or torch.get_num_threads() != len(cores):
        return False
    try:
        own = library(_SOURCE)
    except CompilerMissing:
        return False
    failed = own.pin_threads((ctypes.c_int * len(cores))(*cores), len(cores))
    if failed:
        log.warning("thread_pinning_failed", num_threads=failed)
    return not failed
