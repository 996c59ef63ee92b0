"""`python -m lorikeet.adapters.learning`: settings and jobs come as lines of standard input, answers go to its output.

It runs where a processor would be idle: with the priority SCHED_IDLE on Linux, else with the highest niceness. It ends
with the shard, whose end closes its input.
"""

import io
import os
import select
import signal
import sys

from lorikeet.proto.process import signal_at_parent_death


def step_back() -> None:
    """Take the lowest priority, before anything is computed."""
    os.nice(19)
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def is_abandoned() -> bool:
    """Whether the shard has closed the pipe: while a job runs nothing else can make it readable."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def main() -> int:
    """Run the process."""
    step_back()
    signal_at_parent_death()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the shard ends it
    from lorikeet.adapters.learning.rounds import Abandoned, Rounds
    from lorikeet.proto import logs
    from lorikeet.proto.learning import read_job, read_settings, write_line

    stream = io.FileIO(0, "r")  # unbuffered: select sees what is not read yet
    settings = read_settings(stream.readline())
    logs.configure(settings.json_output, settings.log_level, "trainer")
    rounds = Rounds(settings, is_abandoned)
    rounds.prepare()
    try:
        while line := stream.readline():
            sys.stdout.buffer.write(write_line(rounds.do(read_job(line))))
            sys.stdout.buffer.flush()
    except (Abandoned, BrokenPipeError):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
