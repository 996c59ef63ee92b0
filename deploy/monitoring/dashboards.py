"""Writes the Grafana dashboards in grafana/dashboards: `python deploy/monitoring/dashboards.py`.

Rows of panels are data; Grafana's JSON is made from them. For Grafana 10.4 and later.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
RATE = "[$__rate_interval]"
SELECT = 'job=~"$job", instance=~"$instance"'
COLUMNS, HEIGHT = 24, 8


@dataclass(frozen=True)
class Panel:
    """A graph or a number: PromQL by the text of its legend."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    text: str = ""
    """What it shows, for those who do not know."""
    kind: str = "timeseries"
    width: int = 8
    height: int = HEIGHT
    decimals: int | None = None
    """Digits after the point; None: as many as Grafana finds useful."""


def rate(metric: str, *by: str, of: str = "") -> str:
    """Per second, added up over routers."""
    inside = f"{SELECT}, {of}" if of else SELECT
    return f"sum{_by(by)} (rate({metric}{{{inside}}}{RATE}))"


def total(metric: str, *by: str) -> str:
    """The current value, added up over routers."""
    return f"sum{_by(by)} ({metric}{{{SELECT}}})"


def increase(metric: str) -> str:
    """Events of the last hour, added up over routers."""
    return f"sum (increase({metric}{{{SELECT}}}[1h]))"


def quantile(share: float, metric: str, *by: str) -> str:
    """The quantile of a histogram over the rate's window."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', 'le', *by)})"


def quantiles(metric: str) -> dict[str, str]:
    return {f"p{round(100 * share)}": quantile(share, metric) for share in (0.5, 0.95, 0.99)}


def number(title: str, expression: str, unit: str = "short", text: str = "", decimals: int | None = None) -> Panel:
    """A single number: its current value, or that over the rate's window."""
    return Panel(title, {"": expression}, unit, text, kind="stat", width=4, height=4, decimals=decimals)


def over(numerator: str, denominator: str) -> str:
    """A ratio that is absent while the whole is 0."""
    return f"{numerator} / ({denominator} > 0)"


def _by(names: tuple[str, ...]) -> str:
    return f" by ({', '.join(names)})" if names else ""


def top(expression: str, count: int = 10) -> str:
    return f"topk({count}, {expression})"


OVERVIEW = {
    "Now": [
        number("Requests per second", rate("lorax_request_count"), "reqps"),
        number("Output tokens per second", rate("lorikeet_generated_tokens_total"), decimals=0),
        number("First token, median", quantile(0.5, "lorikeet_time_to_first_token_seconds"), "s"),
        number("Between tokens, median", quantile(0.5, "lorikeet_inter_token_latency_seconds"), "s"),
        number("Queue", total("lorax_queue_length"), text="Requests that wait for a place in a shard."),
        number(
            "Failed requests",
            over(rate("lorax_request_failure"), rate("lorax_request_count")),
            "percentunit",
            "The share of requests that failed.",
        ),
    ],
    "Traffic": [
        Panel("Requests", {"arrived": rate("lorax_request_count"), "answered": rate("lorax_request_success")}, "reqps"),
        Panel(
            "Tokens",
            {"prompt": rate("lorikeet_prompt_tokens_total"), "output": rate("lorikeet_generated_tokens_total")},
            "short",
            "Tokens per second.",
        ),
        Panel(
            "Failures by reason",
            {"{{err}}": rate("lorax_request_failure", "err")},
            "reqps",
            "The reasons are those of docs/reference/errors.md.",
        ),
    ],
    "Latency": [
        Panel("Time to first token", quantiles("lorikeet_time_to_first_token_seconds"), "s"),
        Panel("Inter-token latency", quantiles("lorikeet_inter_token_latency_seconds"), "s"),
        Panel("Whole requests", quantiles("lorax_request_duration"), "s"),
        Panel("Time in the queue", quantiles("lorikeet_queue_seconds"), "s"),
        Panel("Steps", {"{{method}} p95": quantile(0.95, "lorax_batch_inference_duration", "method")}, "s"),
        Panel(
            "First token within 500 ms",
            {
                "share": over(
                    rate("lorikeet_time_to_first_token_seconds_bucket", of='le="0.498789"'),
                    rate("lorikeet_time_to_first_token_seconds_count"),
                )
            },
            "percentunit",
            "The share of requests that met this objective.",
        ),
    ],
    "Load": [
        Panel(
            "Requests now",
            {
                "running": total("lorikeet_running_requests"),
                "queued": total("lorax_queue_length"),
                "waiting in shards": total("lorikeet_shard_waiting_requests"),
            },
        ),
        Panel(
            "KV pages",
            {
                "used": over(total("lorikeet_kv_pages_used"), total("lorikeet_kv_pages")),
                "cached prefixes": over(total("lorikeet_kv_pages_cached"), total("lorikeet_kv_pages")),
            },
            "percentunit",
        ),
        Panel(
            "Prompt tokens from the prefix cache",
            {"share": over(rate("lorikeet_cached_prompt_tokens_total"), rate("lorikeet_prompt_tokens_total"))},
            "percentunit",
        ),
        Panel(
            "Preemptions",
            {"per second": rate("lorikeet_preemptions_total")},
            "ops",
            "Requests that lost their KV pages because memory ran out, and compute again.",
        ),
        Panel("Callers", {"active": total("lorikeet_active_callers")}),
        Panel(
            "Tokens by API key",
            {"{{caller}}": top(rate("lorikeet_caller_tokens_total", "caller"))},
            "short",
            "Prompt and output tokens per second of the ten keys with most.",
        ),
        Panel(
            "Requests taken back",
            {
                "for another caller": rate("lorikeet_requests_taken_back_total"),
                "until they are read": rate("lorikeet_requests_held_total"),
            },
            "ops",
            "They left their shard and continue later with the same tokens.",
        ),
        Panel(
            "Device idle between steps",
            {"share": rate("lorikeet_device_idle_seconds_total")},
            "percentunit",
            "Seconds per second that devices waited for the host.",
        ),
        Panel(
            "Rejected before any route", {"{{reason}}": rate("lorikeet_connections_rejected_total", "reason")}, "reqps"
        ),
    ],
}
ADAPTERS = {
    "Now": [
        number("In slots", total("lorikeet_adapters_resident"), text="Adapters on the device."),
        number("Known", total("lorikeet_adapters_known"), text="Adapters whose content the router knows."),
        number("Loading", total("lorikeet_adapters_loading"), text="Adapters that are being loaded."),
        number(
            "Requests found it in a slot",
            over(rate("lorikeet_adapter_hits_total", of='tier="slot"'), rate("lorikeet_adapter_hits_total")),
            "percentunit",
        ),
        number("Load, 95 %", quantile(0.95, "lorikeet_adapter_load_seconds"), "s", "Time to load an adapter."),
        number("Errors of adapters", rate("lorikeet_adapter_errors_total"), "ops"),
    ],
    "Where adapters are": [
        Panel(
            "Adapters",
            {
                "in slots": total("lorikeet_adapters_resident"),
                "known": total("lorikeet_adapters_known"),
                "loading": total("lorikeet_adapters_loading"),
                "pinned": total("lorikeet_adapters_pinned"),
            },
        ),
        Panel(
            "Requests by tier",
            {"{{tier}}": rate("lorikeet_adapter_hits_total", "tier")},
            "reqps",
            "Whether the adapter was in a slot when its request was sent.",
        ),
        Panel(
            "Requests whose adapter was in a slot",
            {"share": over(rate("lorikeet_adapter_hits_total", of='tier="slot"'), rate("lorikeet_adapter_hits_total"))},
            "percentunit",
        ),
        Panel("Loads by tier", {"{{tier}}": rate("lorikeet_adapter_loads_total", "tier")}, "ops"),
        Panel("Seconds per load", {"{{tier}} p95": quantile(0.95, "lorikeet_adapter_load_seconds", "tier")}, "s"),
        Panel("Evictions by tier", {"{{tier}}": rate("lorikeet_adapter_evictions_total", "tier")}, "ops"),
    ],
    "By adapter": [
        Panel(
            "Requests, ten busiest",
            {"{{adapter}}": top(rate("lorikeet_adapter_requests_total", "adapter"))},
            "reqps",
            width=12,
        ),
        Panel(
            "Output tokens, ten busiest",
            {"{{adapter}}": top(rate("lorikeet_adapter_generated_tokens_total", "adapter"))},
            width=12,
        ),
        Panel("Running", {"{{adapter}}": top(total("lorikeet_adapter_running_requests", "adapter"))}),
        Panel("Waiting", {"{{adapter}}": top(total("lorikeet_adapter_waiting_requests", "adapter"))}),
        Panel("Errors of adapters", {"{{adapter}}": top(rate("lorikeet_adapter_errors_total", "adapter"))}, "ops"),
        Panel(
            "Prompts that do not activate their adapter",
            {"{{adapter}}": top(rate("lorikeet_adapter_not_activated_total", "adapter"))},
            "ops",
        ),
        Panel("Shards that have it in a slot", {"{{adapter}}": top(total("lorikeet_adapter_resident", "adapter"))}),
        Panel(
            "Prompt tokens, ten busiest", {"{{adapter}}": top(rate("lorikeet_adapter_prompt_tokens_total", "adapter"))}
        ),
    ],
}
SPECULATION = {
    "Now": [
        number(
            "Accepted",
            over(rate("lorikeet_accepted_tokens_total"), rate("lorikeet_drafted_tokens_total")),
            "percentunit",
            "Accepted draft tokens over those that were verified.",
        ),
        number("Drafted per second", rate("lorikeet_drafted_tokens_total"), decimals=0),
        number("Accepted per second", rate("lorikeet_accepted_tokens_total"), decimals=0),
        number(
            "Output tokens from drafts",
            over(rate("lorikeet_accepted_tokens_total"), rate("lorikeet_generated_tokens_total")),
            "percentunit",
            "The share of output tokens that were accepted draft tokens.",
        ),
        number(
            "Tokens per step",
            "1 + " + over(rate("lorikeet_speculation_accepted_tokens_total"), rate("lorikeet_speculation_steps_total")),
            text="Of steps that verified drafts.",
            decimals=2,
        ),
        number("Time of drafts", rate("lorikeet_speculation_seconds_total"), "percentunit", "Seconds per second."),
    ],
    "All": [
        Panel(
            "Acceptance rate",
            {"share": over(rate("lorikeet_accepted_tokens_total"), rate("lorikeet_drafted_tokens_total"))},
            "percentunit",
            "Accepted draft tokens over those that were verified.",
        ),
        Panel(
            "Draft tokens",
            {"drafted": rate("lorikeet_drafted_tokens_total"), "accepted": rate("lorikeet_accepted_tokens_total")},
        ),
        Panel(
            "Tokens per step",
            {
                "{{method}}": "1 + "
                + over(
                    rate("lorikeet_speculation_accepted_tokens_total", "method"),
                    rate("lorikeet_speculation_steps_total", "method"),
                )
            },
            text="Of steps that verified drafts.",
        ),
    ],
    "By method": [
        Panel(
            "Acceptance rate",
            {
                "{{method}}": over(
                    rate("lorikeet_speculation_accepted_tokens_total", "method"),
                    rate("lorikeet_speculation_drafted_tokens_total", "method"),
                )
            },
            "percentunit",
        ),
        Panel(
            "Accepted at each position",
            {
                "{{method}} {{position}}": rate(
                    "lorikeet_speculation_accepted_tokens_per_position_total", "method", "position"
                )
            },
        ),
        Panel(
            "Seconds by phase",
            {"{{method}} {{phase}}": rate("lorikeet_speculation_seconds_total", "method", "phase")},
            "percentunit",
            "Seconds per second spent proposing, verifying and accepting.",
        ),
    ],
    "By adapter": [
        Panel(
            "Acceptance rate",
            {
                "{{adapter}}": over(
                    rate("lorikeet_speculation_accepted_tokens_total", "adapter"),
                    rate("lorikeet_speculation_drafted_tokens_total", "adapter"),
                )
            },
            "percentunit",
            width=12,
        ),
        Panel(
            "Drafted tokens, ten most",
            {"{{adapter}}": top(rate("lorikeet_speculation_drafted_tokens_total", "adapter"))},
            width=12,
        ),
    ],
    "Heads learned from traffic": [
        Panel("Trained heads", {"{{decision}}": rate("lorikeet_learning_decisions_total", "decision")}),
        Panel(
            "Training",
            {
                "running": rate("lorikeet_learning_training_seconds_total"),
                "on a processor": rate("lorikeet_learning_cpu_seconds_total"),
            },
            "percentunit",
            "Counted at the end of each training. It runs only where a processor is idle.",
        ),
        Panel(
            "Collected tokens",
            {"per second": rate("lorikeet_learning_rows_total"), "bytes kept": total("lorikeet_learning_ring_bytes")},
        ),
    ],
}
RECOVERY = {
    "Now": [
        number("Routers with a ready shard", total("lorikeet_shard_ready")),
        number("Streams lost", increase("lorikeet_shard_reconnects_total"), text="In the last hour.", decimals=0),
        number("Requests retried", increase("lorikeet_requests_retried_total"), text="In the last hour.", decimals=0),
        number("Failed steps", increase("lorax_batch_inference_failure"), text="In the last hour.", decimals=0),
        number("Running requests", total("lorikeet_running_requests")),
        number("Credit", total("lorikeet_credit_requests"), text="Requests that shards could start now."),
    ],
    "Shards": [
        Panel(
            "Routers with a ready shard",
            {"{{instance}}": total("lorikeet_shard_ready", "instance")},
            text="0 while no shard accepts requests: they wait, and /ready is 503.",
        ),
        Panel(
            "Streams lost",
            {"{{instance}}": rate("lorikeet_shard_reconnects_total", "instance")},
            "ops",
            "Shards that exited, hung or were replaced.",
        ),
        Panel(
            "Requests retried",
            {"per second": rate("lorikeet_requests_retried_total")},
            "reqps",
            "They continued on another shard; their clients saw a pause.",
        ),
        Panel("Failed steps", {"{{method}}": rate("lorax_batch_inference_failure", "method")}, "ops"),
        Panel("Credit", {"requests": total("lorikeet_credit_requests")}, text="What shards could start now."),
        Panel("Credit in KV tokens", {"tokens": total("lorikeet_credit_kv_tokens")}),
    ],
    "Requests": [
        Panel("Reason for the shard", {"{{reason}}": rate("lorikeet_routing_decisions_total", "reason")}, "reqps"),
        Panel(
            "Ended by the router",
            {"per second": rate("lorikeet_aborts_total")},
            "reqps",
            "Cancelled by clients, or complete at a stop string.",
        ),
        Panel("Usage records lost", {"{{to}}": rate("lorikeet_usage_dropped_total", "to")}, "ops"),
    ],
}
DASHBOARDS = {"overview": OVERVIEW, "adapters": ADAPTERS, "speculation": SPECULATION, "recovery": RECOVERY}


def dashboard(name: str, rows: dict[str, list[Panel]]) -> dict[str, Any]:
    """Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in rows.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": _at(0, y, COLUMNS, 1)})
        x, y = 0, y + 1
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y = 0, y + panel.height
            panels.append(_panel(panel, len(panels) + 1, _at(x, y, panel.width, panel.height)))
            x += panel.width
        y += row[-1].height
    return {
        "uid": f"lorikeet-{name}",
        "title": f"Lorikeet: {name}",
        "tags": ["lorikeet"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [{"type": "dashboards", "title": "Lorikeet", "tags": ["lorikeet"], "asDropdown": False}],
        "templating": {"list": [_datasource(), _variable("job"), _variable("instance")]},
        "panels": panels,
    }


def _panel(panel: Panel, identity: int, position: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    options: dict[str, Any]
    if panel.kind == "stat":
        defaults |= {"color": {"mode": "fixed", "fixedColor": "text"}}
        defaults |= {} if panel.decimals is None else {"decimals": panel.decimals}
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "textMode": "value"}
    else:
        defaults["custom"] = {"fillOpacity": 8, "showPoints": "never"}
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "id": identity,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "gridPos": position,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _variable(name: str) -> dict[str, Any]:
    """Values of a label that routers have."""
    query = f"label_values(lorikeet_shard_ready, {name})"
    return {
        "name": name, "type": "query", "label": name.capitalize(), "query": {"query": query, "refId": name},
        "datasource": {"type": "prometheus", "uid": "${datasource}"}, "includeAll": True, "multi": True,
        "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "refresh": 2,
    }  # fmt: skip


def write(folder: Path = FOLDER) -> None:
    """All of them."""
    for name, rows in DASHBOARDS.items():
        text = json.dumps(dashboard(name, rows), indent=1) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
