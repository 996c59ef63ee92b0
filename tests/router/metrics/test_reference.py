"""The table of all metrics is complete and up to date."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import metrics as reference
from tests.router.serving import serving

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == "\n".join(reference.lines()) + "\n", "run make docs"


@pytest.mark.anyio
async def test_whatever_a_server_exports_is_in_the_table(tmp_path: Path) -> None:
    async with serving(tmp_path, adapters=True, metrics_prefix=("vllm",)) as server:
        parameters = {"adapter_id": server.adapter("fox"), "max_new_tokens": 3}
        assert (await server.client.post("/generate", json={"inputs": "a", "parameters": parameters})).is_success
        await server.client.post("/generate", json={"inputs": 3})
        text = (await server.client.get("/metrics")).text
    table = {family.name: set(reference.labels(family)) for family in reference.families()}
    exported = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(exported) > 80 and set(exported) <= set(table)
    for name, labels in re.findall(r"^(\S+?)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        family = name if name in table else re.sub("_(bucket|sum|count)$", "", name)
        assert set(re.findall(r'(\w+)="', labels)) - {"le"} <= table[family]


def test_every_metric_is_explained() -> None:
    for family in reference.families():
        assert len(family.documentation) > 4 and family.documentation[0].isalnum(), family.name
