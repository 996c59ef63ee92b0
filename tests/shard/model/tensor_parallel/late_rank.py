"""RANK PORT: one of two ranks. The second one is late, once while they load and once while they serve. The first one
prints its port.
"""

import sys
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from lorikeet.shard.model.tensor_parallel import group as group_module

SHORT_S, LATE_S = 1.0, 3.0


def main() -> None:
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    group_module.prefer_loopback("127.0.0.1")
    timeout = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False, timeout=timeout)
    if rank == 0:
        print(store.port, flush=True)
    group = group_module.Group(rank, 2, store, torch.device("cpu"), 60.0)
    for is_serving in (False, True):
        if is_serving:
            group.sum(torch.ones(1))
            group.serve(SHORT_S)
        if rank == 1:
            time.sleep(LATE_S)
        try:
            group.sum(torch.ones(1))
            print("waited", flush=True)
        except RuntimeError:
            print("gave-up", flush=True)


if __name__ == "__main__":
    main()
