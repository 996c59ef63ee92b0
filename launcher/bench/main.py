"""`lorikeet-bench run` loads a server and prints what it measured; `lorikeet-bench compare` compares two results."""

import argparse
import gc
import json
import math
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import uvloop

from lorikeet.launcher.bench import apis, compare, printed, report, result, workload
from lorikeet.launcher.bench.connection import Connections
from lorikeet.launcher.bench.load import Load, Loaded
from lorikeet.launcher.cli.client import URL_HELP
from lorikeet.proto import server_url

_EXAMPLES = """examples:
  lorikeet-bench run --num-prompts 200 --max-concurrency 16
  lorikeet-bench run --api lorax --adapters json,sql,cite --adapter-distribution zipf --html report.html
  lorikeet-bench run --request-rate 8 --burstiness 0.5 --goodput ttft:500 tpot:50 --result a.json
  lorikeet-bench compare a.json b.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process: 0, 1 with one sentence, or 130 after Ctrl-C."""
    given = parser().parse_args(arguments)
    try:
        return _compare(given) if given.command == "compare" else _run(given)
    except (ValueError, OSError) as error:
        print(f"lorikeet-bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="lorikeet-bench",
        description="Loads an OpenAI- or LoRAX-compatible server and prints what it measured.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    group.add_argument("--url", help=URL_HELP)
    group.add_argument("--api", choices=tuple(apis.APIS), default="openai", help="default: %(default)s")
    group.add_argument("--model", help="the model's name (default: the first that /v1/models lists)")
    group.add_argument("--token", help="bearer token (default: the variable LORIKEET_TOKEN)")
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


def _length(text: str) -> workload.Length:
    try:
        return workload.Length.read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def _compare(given: argparse.Namespace) -> int:
    print(compare.compared(*(compare.read(Path(name)) for name in (given.first, given.second))))
    return 0


def _run(given: argparse.Namespace) -> int:
    percentiles, shown = _percentiles(given.metric_percentiles), given.percentile_metrics.split(",")
    objectives = result.goals(given.goodput)
    given.url = server_url.normalized(given.url or server_url.default())
    plan = workload.plan(given)
    result.check_latencies(shown, plan, given.max_concurrency)
    headers = _headers(given)
    print(f"lorikeet-bench: sends {workload.summary(plan)}", file=sys.stderr)
    loaded, about = uvloop.run(_measure(given, plan, headers))
    measured = about | result.measured(loaded, percentiles, objectives, shown)
    block = printed.block(measured, shown, percentiles)
    print(block)
    _write(given, measured, block)
    if errors := sorted({error for error in measured["errors"] if error}):
        print(f"lorikeet-bench: {measured['failed']} requests failed, among them: {errors[0]}", file=sys.stderr)
    return 0 if measured["completed"] else 1


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= each <= 100 for each in found):
        raise ValueError(f"--metric-percentiles {text!r} is not a list such as 50,99.9")
    return found


def _headers(given: argparse.Namespace) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in given.header:
        name, colon, value = line.partition(":")
        if not colon or any(character in line for character in "\r\n"):
            raise ValueError(f"--header {line!r} is not NAME: VALUE")
        headers[name.strip().lower()] = value.strip()
    if token := given.token or os.environ.get("LORIKEET_TOKEN"):
        headers["authorization"] = f"Bearer {token}"
    return headers


async def _measure(
    given: argparse.Namespace,
    plan: list[workload.Planned],
    headers: dict[str, str],
) -> tuple[Loaded, result.Result]:
    """What the load has shown, and the result's fields that are not computed from it."""
    connections = Connections(given.url, headers, given.timeout_s)
    try:
        model = given.model or ("" if given.api == "lorax" else await _first_model(connections))
        api = apis.APIS[given.api](model, given.extra_body, not given.stop_at_eos)
        load = Load(connections, api, given.max_concurrency, shows_progress=not given.no_progress)
        await load.warm_up([plan[index % len(plan)] for index in range(given.num_warmups)])
        before = await result.counts(connections)
        gc.collect()
        gc.freeze()  # the collector would pause the client for every thousand events
        loaded = await load.run(plan)
        rates = result.rates(before, await result.counts(connections))
    finally:
        await connections.close()
    return loaded, {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": given.api,
        "backend": given.api,
        "label": given.label,
        "model_id": model or given.url,
        "tokenizer_id": given.tokenizer,
        "num_prompts": len(plan),
        "request_rate": "inf" if math.isinf(given.request_rate) else given.request_rate,
        "burstiness": 1.0 if given.burstiness is None else given.burstiness,
        "max_concurrency": given.max_concurrency,
        **rates,
    }


async def _first_model(connections: Connections) -> str:
    response = await connections.get("/v1/models")
    try:
        return str(json.loads(response.body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ValueError(f"the server lists no model at /v1/models (status {response.status}): give --model") from None


def _write(given: argparse.Namespace, measured: result.Result, block: str) -> None:
    if given.html is not None:
        given.html.write_text(report.html(measured, block), encoding="utf-8")
    if given.svg is not None:
        given.svg.mkdir(parents=True, exist_ok=True)
        for title, svg in report.figures_of(measured).items():
            (given.svg / f"{title.lower().replace(' ', '-')}.svg").write_text(svg + "\n", encoding="utf-8")
    if given.csv is not None:
        given.csv.write_text(report.table(measured), encoding="utf-8")
    if given.result is not None:
        if not given.save_texts:
            measured = measured | {"generated_texts": []}
        given.result.write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
