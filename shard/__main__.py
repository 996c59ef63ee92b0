"""`python -m lorikeet.shard CONFIG.json`: process setup before imports, then `serve`.

Exit code 0 after a clean end, else 1.
"""

import sys

import structlog

from lorikeet.proto import logs
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.system.process import end_process, hold_signals

log = structlog.get_logger()


def main() -> int:
    """Run the process; every failure is one line of log that says what is wrong."""
    hold_signals()
    try:
        config = ShardConfig.read(sys.argv[1])
        logs.configure(config.json_output, config.log_level, "shard")
    except (ValueError, OSError) as error:
        print(f"shard: {error}", file=sys.stderr)
        return 1
    try:
        # Libraries warn and start threads as they are imported, and these inherit which signals are held.
        from lorikeet.shard.startup.serve import serve

        serve(config)
    except (ValueError, OSError) as error:
        log.error("cannot serve", reason=str(error))
        return 1
    except Exception:
        log.exception("the shard ends")
        return 1
    return 0


if __name__ == "__main__":
    end_process(main())
