"""`python -m lorikeet.shard CONFIG.json`: sets up the process before heavy imports, then calls `serve`.

Exit code 0 after a clean end, else 1.
"""

import sys

import structlog

from lorikeet.proto import logs
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.system.process import end_process, hold_signals

log = structlog.get_logger()


def main() -> int:
    """Run the process; every failure is logged as one event with its reason."""
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
        log.error("start_failed", reason=str(error))
        return 1
    except Exception:
        log.exception("shard_failed")
        return 1
    return 0


if __name__ == "__main__":
    end_process(main())
