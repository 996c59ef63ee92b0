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
    "adapters_exact": "texts of many adapters in one batch against PEFT, by architecture",
    "adapters_cost": "[--idle]: what adapters cost against the base, in alternating rounds",
    "adapters_peer": "our server and vLLM with the same eight adapters",
    "adapters_loading": "what running requests feel of 64 loads, how long those take, how long requests wait",
    "adapters_tiers": "the first token of adapters in a slot, in memory, on disk",
    "adapters_fair": "[--weights]: one adapter floods; tokens by weight",
    "adapters_catalogue": "200 adapters, five of them broken: the check and the server",
    "adapters_switch": "an alias that changes its revision under load",
    "adapters_known": "memory of 10 000 aliases in the router",
    "adapters_hostile": "broken adapters and fuzzed headers against a running server",
    "adapters_tenants": "one tenant asks for another's private adapter",
    "lossless": "[--quick] [METHOD…]: texts with and without guessing over HTTP, and counts against the oracle",
    "speculation": "[--quick] [TABLE…]: the tables that other systems publish about speculation",
    "dialled": "[--quick] [WIDTH…]: LMFlow's and Xinference's acceptance through the engine, by a dialled draft",
    "guessing_speed": "[--quick] [--schedule CLIENTS]: what a draft model is worth in time, and schedules",
    "lookup_speed": "[--quick] [--peer]: the copy-heavy adapter with prompt lookup and without, or against vLLM",
    "heads_cost": "[--quick]: steps with Medusa heads against plain ones",
    "tree": "[--quick]: whether trees of guesses would pay, by replay and by the cost of wide steps",
    "receipts": "[RECEIPTS]: receipts of a loaded run, replayed on two replicas and on another server",
    "cuda": "[--smoke] [--part NAME]: every bar on the CUDA device at hand",
    "tune": "[MODEL…]: how the kernels for adapters and heads are best cut up on this GPU; writes the file",
    "quantized": "the packages that quantised bases need, for `proof --part devices-quantized`",
    "proof": "every bar at full size: --part, --list, --check",
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        for name, text in BENCHMARKS.items():
            print(f"python -m benchmarks.{name:18} {text}")
        raise SystemExit(0 if len(sys.argv) < 2 else f"no benchmark called {sys.argv[1]}")
    name = sys.argv.pop(1)
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
