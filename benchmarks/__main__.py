"""What can be measured, and how: `python -m benchmarks [NAME ARGUMENTS…]`. Knows names only.

Every benchmark prints a table for people and a line of JSON last; `benchmarks.proof` runs all of them at full size.
"""

import runpy
import sys

BENCHMARKS = {
    "machine": "the machine's own speeds and the limit that follows",
    "closed_loop": "CLIENTS: our server and vLLM in alternating rounds",
    "open_loop": "the highest rate with a first token within two seconds, ours and vLLM's",
    "router": "the router alone: streamed tokens per second and what it adds to the first token",
    "step": "one forward pass against the machine's limit",
    "exact": "greedy texts against transformers, by architecture",
    "leak": "[REQUESTS]: hostile requests; pages held when idle",
    "start": "seconds to ready of the embedded model",
    "proof": "every bar at full size: --part, --list, --check",
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        for name, text in BENCHMARKS.items():
            print(f"python -m benchmarks.{name:12} {text}")
        raise SystemExit(0 if len(sys.argv) < 2 else f"no benchmark called {sys.argv[1]}")
    name = sys.argv.pop(1)
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
