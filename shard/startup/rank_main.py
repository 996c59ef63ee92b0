"""`python -m lorikeet.shard.startup.rank_main FD`: a rank of a shard, told what to do over an inherited socket.

Exit code 0 after a clean end, else 1.
"""

import signal
import sys
from multiprocessing.connection import Connection

import structlog

from lorikeet.proto.process import signal_at_parent_death
from lorikeet.shard.system.process import end_process

log = structlog.get_logger()


def main() -> int:
    """Run the process; every failure is one line of log that says what is wrong."""
    # The first rank decides when this one ends, also where a signal is for all processes of a server.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal_at_parent_death()
    link = Connection(int(sys.argv[1]))
    try:
        from lorikeet.shard.startup.rank_worker import follow

        follow(link)
    except (ValueError, OSError) as error:
        log.error("a rank cannot serve", reason=str(error))
        return 1
    except Exception:
        log.exception("a rank ends")
        return 1
    return 0


if __name__ == "__main__":
    end_process(main())
