"""`python -m lorikeet.shard CONFIG.json`: sets up the process before heavy imports, then calls `serve`.

Exit code 0 after a clean end, else 1.
"""

import sys
import time

import structlog

from lorikeet.proto import logs
from lorikeet.proto.process import report_failure
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.system.process import end_process, hold_signals

log = structlog.get_logger()

REPORTED_S = 1.0
"""Time for the launcher to end a start that failed before the router logs a lost connection."""


def main() -> int:
    """Run the process; the reason of a failure is left for the launcher, or logged."""
    hold_signals()
    try:
        config = ShardConfig.read(sys.argv[1])
        logs.configure(config.json_output, config.log_level, "shard")
    except (ValueError, OSError) as error:
        print(f"shard: {error}", file=sys.stderr)
        return 1
    try:
        # Libraries warn and start threads while they are imported; the threads inherit the blocked signals.
        from lorikeet.shard.startup.serve import serve

        serve(config)
    except (ValueError, OSError) as error:
        if not report_failure(config.failure_file, str(error)):
            log.error("start_failed", reason=str(error))
        else:
            time.sleep(REPORTED_S)
        return 1
    except Exception as error:
        log.exception("shard_failed")
        report_failure(config.failure_file, f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    end_process(main())
