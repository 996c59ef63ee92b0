"""`python -m lorikeet.shard.startup.rank_main FD`: a further rank of a shard, with commands from an inherited socket.

Apart from rank_worker, because signals must be set up before that module's imports. Exit code 0 after a clean end,
else 1.
"""

import signal
import sys
from multiprocessing.connection import Connection

import structlog

from lorikeet.proto.process import signal_at_parent_death
from lorikeet.shard.system.process import end_process

log = structlog.get_logger()


def main() -> int:
    """Run the process; every failure is logged as one event with its reason."""
    # The first rank ends this one, even when a signal is sent to all processes of a server.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal_at_parent_death()
    link = Connection(int(sys.argv[1]))
    try:
        from lorikeet.shard.startup.rank_worker import run_rank

        run_rank(link)
    except (ValueError, OSError) as error:
        log.error("start_failed", reason=str(error))
        return 1
    except Exception:
        log.exception("rank_failed")
        return 1
    return 0


if __name__ == "__main__":
    end_process(main())
