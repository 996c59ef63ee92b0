"""`lorikeet-bench run` loads a server and prints what it measured; `lorikeet-bench compare` compares two results."""

import argparse
import asyncio
import gc
import json
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import uvloop

from lorikeet.launcher.bench import load, presentation, processes, result, workload
from lorikeet.launcher.bench.load import ConnectionPool, LoadResult
from lorikeet.launcher.bench.processes import ClientSettings
from lorikeet.launcher.cli.client import add_server_options, command_parser, token_of
from lorikeet.proto import server_url

_EXAMPLES = """examples:
  lorikeet-bench run --num-prompts 200 --max-concurrency 16
  lorikeet-bench run --api lorax --adapters json,sql,cite --adapter-distribution zipf --html report.html
  lorikeet-bench run --request-rate 8 --burstiness 0.5 --goodput ttft:500 tpot:50 --result a.json
  lorikeet-bench compare a.json b.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process: 0, 1 with one sentence, or 130 after Ctrl-C."""
    options = parser().parse_args(arguments)
    try:
        return _compare(options) if options.command == "compare" else _run(options)
    except (ValueError, OSError) as error:
        print(f"lorikeet-bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = command_parser(
        "lorikeet-bench", "Loads an OpenAI- or LoRAX-compatible server and prints what it measured.", _EXAMPLES
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run", help="send requests and measure", epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_server(run.add_argument_group("server"))
    _add_load(run.add_argument_group("load"))
    _add_texts(run.add_argument_group("prompts and outputs"))
    _add_adapters(run.add_argument_group("adapters"))
    _add_results(run.add_argument_group("results"))
    pair = commands.add_parser("compare", help="compare two results of --result")
    pair.add_argument("first", metavar="A.json")
    pair.add_argument("second", metavar="B.json")
    return top


def _add_server(group: Any) -> None:
    add_server_options(group)
    group.add_argument("--api", choices=tuple(load.APIS), default="openai", help="default: %(default)s")
    group.add_argument("--model", help="the model's name (default: the first that /v1/models lists)")
    group.add_argument("--header", action="append", default=[], metavar="NAME: VALUE", help="may be repeated")
    group.add_argument("--extra-body", type=_fields, default={}, metavar="JSON", help="fields of every request")
    group.add_argument("--timeout-s", type=float, default=600.0, help="of one request (default: %(default)g)")


def _add_load(group: Any) -> None:
    group.add_argument(
        "--num-prompts", type=int, metavar="N",
        help=f"requests (default: {workload.NUM_PROMPTS}, or all of a shorter --dataset)",
    )  # fmt: skip
    group.add_argument("--max-concurrency", type=int, metavar="N", help="requests at a time (default: no limit)")
    group.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="R",
        help="arrivals per second: an open loop. Without it, a closed loop of --max-concurrency clients",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=float, metavar="B",
        help="shape of the gamma distribution of gaps of --request-rate: 1 is Poisson (default), less is burstier, "
        "inf is constant",
    )  # fmt: skip
    group.add_argument(
        "--processes", type=int, default=1, metavar="N",
        help="client processes, which share the requests; with several, no progress is shown (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--num-warmups", type=int, default=1, metavar="N", help="requests before (default: %(default)s)")
    group.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: %(default)s)")


def _add_texts(group: Any) -> None:
    forms = "128, uniform:64-256, normal:128,32, lognormal:128,2 or exponential:128"
    group.add_argument("--input-len", type=_length, metavar="L", help=f"{forms}; default: 128")
    group.add_argument("--output-len", type=_length, metavar="L", help="tokens; default: 64")
    group.add_argument(
        "--tokenizer", metavar="FOLDER", help="with tokenizer.json: --input-len is in its tokens, not words"
    )
    group.add_argument("--prefix-len", type=int, metavar="N", help="further length that prompts share (default: 0)")
    group.add_argument("--num-prefixes", type=int, metavar="N", help="different shared beginnings (default: 1)")
    group.add_argument(
        "--dataset", type=Path, metavar="FILE",
        help="JSON lines with `prompt`, and optionally `output_tokens`, `adapter`, `at` (seconds); or ShareGPT's JSON",
    )  # fmt: skip
    group.add_argument("--stop-at-eos", action="store_true", help="let outputs end early")


def _add_adapters(group: Any) -> None:
    group.add_argument("--adapters", default="", metavar="A,B", help="names, or @FILE with one per line")
    group.add_argument(
        "--adapter-distribution", choices=workload.ADAPTER_DISTRIBUTIONS,
        help="zipf (default), uniform, distinct: one after another, trace: as the dataset says (default where it does)",
    )  # fmt: skip
    group.add_argument("--zipf-exponent", type=float, metavar="S", help="default: 1")


def _add_results(group: Any) -> None:
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="objectives: ttft, tpot, e2el")
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        metavar="NAMES",
        help=f"{', '.join(result.LATENCIES)}; default: %(default)s",
    )
    group.add_argument("--metric-percentiles", default="99", metavar="P,P", help="default: %(default)s")
    group.add_argument("--result", type=Path, metavar="FILE", help="write the result as JSON")
    group.add_argument("--csv", type=Path, metavar="FILE", help="write one line per request")
    group.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots")
    group.add_argument("--svg", type=Path, metavar="FOLDER", help="write each plot as a file")
    group.add_argument("--label", default="", help="for the report")
    group.add_argument("--save-texts", action="store_true", help="include generated texts in --result")
    group.add_argument("--no-progress", action="store_true")


def _length(text: str) -> workload.LengthDistribution:
    try:
        return workload.LengthDistribution.read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return fields


def _compare(options: argparse.Namespace) -> int:
    print(presentation.compared(*(presentation.read(Path(name)) for name in (options.first, options.second))))
    return 0


def _run(options: argparse.Namespace) -> int:
    percentiles, latencies = _percentiles(options.metric_percentiles), options.percentile_metrics.split(",")
    objectives = result.goals(options.goodput)
    options.url = server_url.normalized(options.url or server_url.default())
    plan = workload.plan(options)
    result.check_latencies(latencies, plan, options.max_concurrency)
    processes.check(options.processes, len(plan), options.max_concurrency)
    headers = _headers(options)
    print(f"lorikeet-bench: sends {workload.summary(plan)}", file=sys.stderr)
    loaded, about = uvloop.run(_measure(options, plan, headers))
    measured = about | result.measured(loaded, percentiles, objectives, latencies)
    block = presentation.block(measured, latencies, percentiles)
    print(block)
    _write(options, measured, block)
    if errors := sorted({error for error in measured["errors"] if error}):
        print(f"lorikeet-bench: {measured['failed']} requests failed, among them: {errors[0]}", file=sys.stderr)
    return 0 if measured["completed"] else 1


def _percentiles(text: str) -> list[float]:
    try:
        percentiles = [float(word) for word in text.split(",")]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= percentile <= 100 for percentile in percentiles):
        raise ValueError(f"--metric-percentiles {text!r} is not a list such as 50,99.9")
    return percentiles


def _headers(options: argparse.Namespace) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in options.header:
        name, colon, value = line.partition(":")
        if not colon or any(character in line for character in "\r\n"):
            raise ValueError(f"--header {line!r} is not NAME: VALUE")
        headers[name.strip().lower()] = value.strip()
    if token := token_of(options):
        headers["authorization"] = f"Bearer {token}"
    return headers


async def _measure(
    options: argparse.Namespace,
    plan: list[workload.Planned],
    headers: dict[str, str],
) -> tuple[LoadResult, result.Result]:
    """What the load has shown, and the result's fields that are not computed from it."""
    connections = ConnectionPool(options.url, headers, options.timeout_s)
    try:
        model = options.model or ("" if options.api == "lorax" else await _first_model(connections))
        settings = ClientSettings(
            options.url, headers, options.timeout_s, options.api, model, options.extra_body, not options.stop_at_eos
        )
        shows_progress = not options.no_progress
        generator = settings.generator(connections, options.max_concurrency, shows_progress=shows_progress)
        await generator.warm_up([plan[index % len(plan)] for index in range(options.num_warmups)])
        counts_before = await result.counts(connections)
        gc.collect()
        gc.freeze()  # the collector would pause the client for every thousand events
        if options.processes == 1:
            loaded = await generator.run(plan)
        else:
            arguments = options.processes, settings, plan, options.max_concurrency
            loaded = await asyncio.to_thread(processes.run, *arguments)
        rates = result.rates(counts_before, await result.counts(connections))
    finally:
        await connections.close()
    return loaded, {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.api,
        "backend": options.api,
        "label": options.label,
        "model_id": model or options.url,
        "tokenizer_id": options.tokenizer,
        "num_prompts": len(plan),
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": 1.0 if options.burstiness is None else options.burstiness,
        "max_concurrency": options.max_concurrency,
        "client_processes": options.processes,
        **rates,
    }


async def _first_model(connections: ConnectionPool) -> str:
    response = await connections.get("/v1/models")
    try:
        return str(json.loads(response.body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        advice = "give --token, a key of this server" if response.status == 401 else "give --model"
        raise ValueError(f"the server lists no model at /v1/models (status {response.status}): {advice}") from None


def _write(options: argparse.Namespace, measured: result.Result, block: str) -> None:
    if options.html is not None:
        options.html.write_text(presentation.html(measured, block), encoding="utf-8")
    if options.svg is not None:
        options.svg.mkdir(parents=True, exist_ok=True)
        for title, svg in presentation.figures_of(measured).items():
            (options.svg / f"{title.lower().replace(' ', '-')}.svg").write_text(svg + "\n", encoding="utf-8")
    if options.csv is not None:
        options.csv.write_text(presentation.table(measured), encoding="utf-8")
    if options.result is not None:
        if not options.save_texts:
            measured = measured | {"generated_texts": []}
        options.result.write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
