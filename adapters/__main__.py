"""`python -m lorikeet.adapters LOADER.json`: the process that loads adapters for one host. Imports no torch.

The exit code is 0 after a clean shutdown, else 1.
"""

import asyncio
import sys
from pathlib import Path

import structlog

from lorikeet.adapters.loader import server
from lorikeet.adapters.loader.config import LoaderConfig
from lorikeet.proto import logs
from lorikeet.proto.process import end_with_parent, report_failure

log = structlog.get_logger()


def main() -> int:
    """Run the process; every failure is one log line."""
    try:
        path = Path(sys.argv[1])
        config = LoaderConfig.read(path)
        logs.configure(config.json_output, config.log_level, "loader")
        logs.adopt_libraries()
    except (ValueError, OSError, IndexError) as error:
        print(f"adapters: {error}", file=sys.stderr)
        return 1
    if config.parent_pid is not None:
        end_with_parent(config.parent_pid)
    try:
        asyncio.run(server.run(config, path))
    except (ValueError, OSError) as error:
        if not report_failure(config.failure_file, str(error)):
            log.error("loader_failed", reason=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
