"""Router, documentation and page take what they show of a draft source from its row: a source that exists in this test
only appears in all of them.
"""

import json
import re
from collections.abc import Iterator

import pytest

from lorikeet.proto import draft_sources
from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.metrics.groups import SpeculationMetrics
from tests.docs.pages import draft_sources as page
from tests.router.scripted_shard import Script
from tests.router.serving import Serving
from tests.toy_source import TOY, registered

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _toy() -> Iterator[None]:
    with registered():
        yield


def output(ids: list[int]) -> pb.RequestOutput:
    """A step whose first token is the toy's, after the first token."""
    return pb.RequestOutput(
        token_ids=ids,
        sources=bytes([pb.SOURCE_PREFILL, TOY.value, pb.SOURCE_BONUS]),
        step_ends=bytes([1, 0, 1]),
        num_drafted=[int(row is TOY) for row in draft_sources.BY_VALUE.values()],
        num_accepted=1,
        logprobs=[-0.5] * 3,
        finish_reason=pb.FINISH_LENGTH,
    )


def test_metrics_count_its_tokens() -> None:
    metrics = SpeculationMetrics()
    metrics.observe(output([1, 2, 3]), 3, "adapter")
    for name in ("drafted_tokens", "accepted_tokens", "steps"):
        assert metrics.values[name]["toy", "adapter"] == 1
    assert metrics.accepted_at == {("toy", "adapter", 0): 1}


async def test_answers_and_capabilities_name_it(server: Serving) -> None:
    ids = server.ids("abc")
    server.shard.answer = lambda submit: Script([], outputs=[output(ids)])
    parameters = {"max_new_tokens": 3, "details": True, "speculative_tokens": 3}
    answer = (await server.client.post("/generate", json={"inputs": "x", "parameters": parameters})).json()
    assert [token["source"] for token in answer["details"]["tokens"]] == ["prefill", "toy", "bonus"]
    report = answer["details"]["speculation"]
    assert (report["drafted"], report["accepted"], report["sources"]["toy"]) == (1, 1, 1)
    shown = (await server.client.get("/v1/capabilities")).json()["speculation"]["sources"]
    assert shown == [row.name for row in draft_sources.BY_VALUE.values()] and shown[-1] == "toy"
    schema = (await server.client.get("/openapi.json")).json()["components"]["schemas"]["Token"]
    assert "toy" in schema["properties"]["source"]["enum"]


async def test_the_page_has_its_name_and_colour(server: Serving) -> None:
    script = (await server.client.get("/ui/assets/sources.js")).text
    names = json.loads(re.findall(r"SOURCES = (.*);", script)[0])
    assert names["toy"] == ["Toy", TOY.meaning] and list(names) == ["target", *shown_names()]
    style = (await server.client.get("/ui/assets/sources.css")).text
    light, dark = re.findall(r"^:root.*$", style, re.MULTILINE)
    assert f"--toy: {TOY.colours.fill};" in light and f"--toy-line: {TOY.colours.dark_line};" in dark
    assert ".token.toy {" in style and ".swatch.toy {" in style and ".parts .toy {" in style


def shown_names() -> list[str]:
    return [row.name for row in draft_sources.BY_VALUE.values()]


def test_the_documentation_lists_it() -> None:
    assert any(line.startswith("| `toy` | Toy | on the host |") for line in page.lines())


def test_names_and_values_are_unique() -> None:
    with pytest.raises(ValueError, match="the draft source toy needs a name and a value"):
        draft_sources.register(TOY)
