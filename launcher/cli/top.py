"""`lorikeet-top`: what a server does now, in a terminal. Metrics and the live view hold no text of any request."""

import argparse
import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lorikeet.launcher.cli.client import add_server_options, command_parser, connect, token_of
from lorikeet.launcher.cli.metrics_page import Interval, Page
from lorikeet.proto import server_url

Snapshot = dict[str, Any]
_STREAM_TIMEOUT_S = 15.0


class LiveStream:
    """Live view of one server. Without such a route, or without the right to it, there is no snapshot."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._guard = threading.Lock()
        self._latest: Snapshot | None = None
        threading.Thread(target=self._follow, name="live view", daemon=True).start()

    @property
    def latest(self) -> Snapshot | None:
        """The last snapshot; None if there is none yet, or the stream has ended."""
        with self._guard:
            return self._latest

    def _follow(self) -> None:
        connection, prefix = connect(self._url, _STREAM_TIMEOUT_S)
        try:
            connection.request("GET", f"{prefix}/v1/live", headers=self._headers)
            response = connection.getresponse()
            if response.status == 200:
                for line in response:
                    if line.startswith(b"data: "):
                        self._set(json.loads(line[len(b"data: ") :]))
        except (OSError, http.client.HTTPException, ValueError):
            pass  # the screen shows that the server is away
        finally:
            connection.close()
            self._set(None)

    def _set(self, snapshot: Snapshot | None) -> None:
        with self._guard:
            self._latest = snapshot


_EXAMPLES = """examples:
  lorikeet-top                          the server at http://127.0.0.1:3000
  lorikeet-top --url :8080 --interval 5
  lorikeet-top --once                   one screen, for scripts
"""
_MAX_ROWS = 12
_TIMEOUT_S = 5.0


class Unreachable(Exception):
    """The server did not show its metrics; the message says why."""


@dataclass(frozen=True)
class MetricsSource:
    """Where metrics come from."""

    url: str
    token: str | None

    def read(self) -> Page:
        """Raises Unreachable."""
        status, body = self._get("/metrics")
        if status in (401, 403):
            raise Unreachable(f"{self.url}/metrics needs a key: give --token, or serve with --metrics-without-key")
        if status != 200:
            raise Unreachable(f"{self.url}/metrics answers {status}")
        try:
            return Page.read(body.decode(), time.monotonic())
        except ValueError:
            raise Unreachable(f"{self.url}/metrics is not Prometheus text") from None

    def model(self) -> str:
        """The model's name; "" if the server does not tell it."""
        try:
            status, body = self._get("/info")
            return str(json.loads(body).get("model_id", "")) if status == 200 else ""
        except (Unreachable, ValueError, AttributeError):
            return ""

    def _get(self, path: str) -> tuple[int, bytes]:
        connection, prefix = connect(self.url, _TIMEOUT_S)
        try:
            headers = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
            connection.request("GET", prefix + path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"cannot connect to {self.url}: {error}") from None
        finally:
            connection.close()


def screen(interval: Interval, title: str, live: Snapshot | None = None) -> RenderableType:
    """Everything, for one interval; `live` adds the shards and their steps."""
    page = interval.last
    columns = Table.grid(expand=True, padding=(0, 1))
    columns.add_column(ratio=1)
    columns.add_column(ratio=1)
    live = live or {}
    traffic, memory = _traffic(interval, live), _memory(interval, live)
    columns.add_row(Panel(traffic, title="traffic"), Panel(memory, title="memory and shards"))
    shards = _shards(live)
    speculation = _speculation(interval)
    adapters = Panel(Group(_adapters(interval), *_adapter_lines(live)), title="adapters")
    parts: list[RenderableType] = [Text(title, style="bold"), columns, adapters]
    if shards.row_count:
        parts.insert(2, Panel(shards, title="shards: P prefill, · decode, + draft tokens of each request of a step"))
    if speculation.row_count:
        parts.append(Panel(speculation, title="speculation"))
    failures = interval.rates("lorax_request_failure", "err")
    if failures:
        text = ", ".join(f"{name} {rate:.2f}/s" for name, rate in sorted(failures.items(), key=lambda pair: -pair[1]))
        parts.append(Panel(Text(text, style="red"), title="failures"))
    if live.get("draining"):
        parts.append(Text("the server shuts down: it finishes running requests", style="bold red"))
    elif page.total("lorikeet_shard_ready") == 0:
        parts.append(Text("no shard accepts requests: they wait", style="bold red"))
    return Group(*parts)


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right")
    return table


def _traffic(interval: Interval, live: Snapshot) -> Table:
    page, table = interval.last, _grid()
    waiting = page.total("lorax_queue_length") + page.total("lorikeet_shard_waiting_requests")
    table.add_row("requests/s", f"{interval.rate('lorax_request_count'):.1f}")
    table.add_row("output tokens/s", f"{interval.rate('lorikeet_generated_tokens_total'):.0f}")
    table.add_row("prompt tokens/s", f"{interval.rate('lorikeet_prompt_tokens_total'):.0f}")
    table.add_row("running", f"{page.total('lorikeet_running_requests'):.0f}")
    table.add_row("waiting", f"{waiting:.0f}")
    if live:
        table.add_row("preempted", str(live["requests"]["preempted"]))
    table.add_row("first token p50, p95", _milliseconds(interval, "lorikeet_time_to_first_token_seconds"))
    table.add_row("between tokens p50, p95", _milliseconds(interval, "lorikeet_inter_token_latency_seconds"))
    return table


def _milliseconds(interval: Interval, histogram: str) -> str:
    quantiles = [interval.quantile(share, histogram) for share in (0.5, 0.95)]
    return ", ".join("–" if value is None else f"{1000 * value:.1f} ms" for value in quantiles)


def _memory(interval: Interval, live: Snapshot) -> Table:
    page, table = interval.last, _grid()
    pages, used = page.total("lorikeet_kv_pages"), page.total("lorikeet_kv_pages_used")
    table.add_row("KV pages", _bar(used, pages))
    table.add_row("kept for prefixes", _bar(page.total("lorikeet_kv_pages_cached"), pages))
    prompt, cached = (interval.rate(f"lorikeet_{name}_total") for name in ("prompt_tokens", "cached_prompt_tokens"))
    table.add_row("prompt from the cache", f"{cached / prompt:.0%}" if prompt else "–")
    table.add_row("preemptions/s", f"{interval.rate('lorikeet_preemptions_total'):.1f}")
    table.add_row("adapters in slots", f"{page.total('lorikeet_adapters_resident'):.0f}")
    if live:
        tiers = live["tiers"]
        table.add_row("in host memory, on disk", f"{tiers['host']}, {tiers['disk']}")
        table.add_row("moving into a slot", str(tiers["into_slot"]))
    table.add_row("adapters loading", f"{page.total('lorikeet_adapters_loading'):.0f}")
    table.add_row("lost shards, retried", "{:.0f}, {:.0f}".format(
        page.total("lorikeet_shard_reconnects_total"), page.total("lorikeet_requests_retried_total")))  # fmt: skip
    return table


def _bar(part: float, total: float, width: int | None = None) -> RenderableType:
    """As wide as there is room, unless `width` is given."""
    if not total:
        return "–"
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total=total, completed=part, width=width), f"{part / total:4.0%}")
    return row


def _adapters(interval: Interval) -> Table:
    page, table = interval.last, Table(box=None, expand=True, header_style="dim")
    table.add_column("adapter", ratio=1, no_wrap=True)
    for name in ("running", "waiting", "requests/s", "tokens/s", "shards with it"):
        table.add_column(name, justify="right")
    running, waiting, resident = (
        page.by(f"lorikeet_adapter_{name}", "adapter") for name in ("running_requests", "waiting_requests", "resident")
    )
    requests, tokens = (
        interval.rates(f"lorikeet_adapter_{name}_total", "adapter") for name in ("requests", "generated_tokens")
    )
    names = sorted({*running, *requests, *tokens})
    busiest = sorted(names, key=lambda name: (-tokens.get(name, 0), -running.get(name, 0), -waiting.get(name, 0)))
    for name in busiest[:_MAX_ROWS]:
        counts = (f"{values.get(name, 0):.0f}" for values in (running, waiting))
        speeds = (f"{requests.get(name, 0):.1f}", f"{tokens.get(name, 0):.0f}", f"{resident.get(name, 0):.0f}")
        table.add_row(name, *counts, *speeds)
    if len(busiest) > _MAX_ROWS:
        table.add_row(Text(f"{len(busiest) - _MAX_ROWS} more", style="dim"))
    return table


def _adapter_lines(live: Snapshot) -> Iterator[Text]:
    """What metrics do not have: names of adapters on their way, and whose requests are preempted."""
    if names := live.get("tiers", {}).get("from_source"):
        yield Text(f"being loaded: {', '.join(names)}")
    preempted = [adapter for adapter in live.get("adapters", ()) if adapter["preempted"]]
    if preempted:
        yield Text(
            "preempted: " + ", ".join(f"{_adapter_name(adapter)} {adapter['preempted']}" for adapter in preempted)
        )


def _adapter_name(adapter: dict[str, Any]) -> str:
    return f"{adapter['num_others']} others" if "num_others" in adapter else adapter["name"] or "base model"


def _shards(live: Snapshot) -> Table:
    """One row for each shard, with its last step as a picture."""
    table = Table(box=None, expand=True, header_style="dim")
    for name in ("shard", "state", "running", "waiting", "adapters", "KV pages", "step ms"):
        table.add_column(name, justify="left" if name in ("shard", "state", "KV pages") else "right")
    table.add_column("step", ratio=1, no_wrap=True)
    for shard in live.get("shards", ()):
        state = "ready" if shard["ready"] else "connected" if shard["connected"] else "lost"
        row: list[str | Text] = [
            str(shard["index"]),
            Text(state, style="" if shard["ready"] else "bold red"),
            str(shard["running"]),
        ]
        pages = _bar(shard["used_pages"], shard["pages"], width=8) if "pages" in shard else "–"
        step = " ".join(_part(part) for part in shard.get("step", ()))
        slots = shard.get("adapter_slots")
        adapters = f"{shard['resident_adapters']} of {slots}" if slots else str(shard["resident_adapters"])
        table.add_row(*row, str(shard.get("waiting", "–")), adapters, pages, str(shard.get("step_ms", "–")), step)
    return table


def _part(part: dict[str, Any]) -> str:
    """What a step computed of one request."""
    computed = f"P{part['tokens']}" if part["prefill"] else "·"
    return computed + (f"+{part['drafts']}" if part["drafts"] else "")


def _speculation(interval: Interval) -> Table:
    table = Table(box=None, expand=True, header_style="dim")
    table.add_column("drafts from", ratio=1)
    for name in ("drafted/s", "accepted/s", "acceptance", "tokens per step"):
        table.add_column(name, justify="right")
    drafted, accepted, steps = (
        interval.rates(f"lorikeet_speculation_{name}_total", "method")
        for name in ("drafted_tokens", "accepted_tokens", "steps")
    )
    for method in sorted(drafted):
        num_accepted = accepted.get(method, 0.0)
        per_step = f"{1 + num_accepted / steps[method]:.2f}" if steps.get(method) else "–"
        table.add_row(
            method, f"{drafted[method]:.0f}", f"{num_accepted:.0f}", f"{num_accepted / drafted[method]:.0%}", per_step
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process: 0, 1 with one sentence, or 130 after Ctrl-C."""
    options = parser().parse_args(arguments)
    try:
        if options.interval <= 0:
            raise ValueError("--interval must be above 0")
        url = server_url.normalized(options.url or server_url.default())
        watch(MetricsSource(url, token_of(options)), options.interval, once=options.once)
    except (Unreachable, ValueError) as error:
        print(f"lorikeet-top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = command_parser("lorikeet-top", "Shows what a server does now. Ctrl-C ends it.", _EXAMPLES)
    add_server_options(result)
    result.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds (default: %(default)g)")
    result.add_argument("--once", action="store_true", help="print one interval and exit")
    return result


def watch(source: MetricsSource, seconds: float, *, once: bool) -> None:
    """Draw every interval until Ctrl-C; later a server that is away is waited for. Raises Unreachable."""
    page = source.read()
    stream = LiveStream(source.url, source.token)
    title = f"{source.model() or 'server'} at {source.url}"
    if once:
        time.sleep(seconds)
        Console().print(screen(Interval(page, source.read()), title, stream.latest))
        return
    with Live(Text(f"{title} …"), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(seconds)
            try:
                later = source.read()
            except Unreachable as error:
                stream = LiveStream(source.url, source.token)  # the old one ends with its connection
                live.update(Text(f"{title}\n{error}", style="red"), refresh=True)
                continue
            live.update(screen(Interval(page, later), title, stream.latest), refresh=True)
            page = later


if __name__ == "__main__":
    sys.exit(main())
