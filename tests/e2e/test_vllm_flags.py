"""A server that is started with vLLM's flags, and OpenAI's client over TLS."""

import signal
from pathlib import Path

import httpx
import openai
import pytest
import trustme

from lorikeet.launcher.exits import Exit
from tests.e2e.launched import ROOT, Launched

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.long
def test_names_adapters_key_template_path_and_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    arguments = ["--served-model-name", "gpt-4o", "tgi", "--chat-template", TEMPLATE, "--root-path", "/llm"]
    arguments += ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--cpu-memory", "256MiB"]
    arguments += ["--lora-modules", f"quotes={ROOT / 'demo' / 'adapters' / 'citation'}", "--max-loras", "4"]
    with Launched(*arguments, API_KEY="secret") as server:
        server.wait_until_ready()
        url = f"https://127.0.0.1:{server.port}"
        assert url in server.output and "secret" not in server.output
        context = httpx.create_ssl_context()
        authority.configure_trust(context)
        with httpx.Client(verify=context) as http:
            assert http.get(f"{url}/health").status_code == 200
            assert http.get(f"{url}/v1/models").status_code == 401
            client = openai.OpenAI(base_url=f"{url}/llm/v1", api_key="secret", http_client=http, max_retries=0)
            names = [model.id for model in client.models.list()]
            assert names[:2] == ["gpt-4o", "tgi"] and "quotes" in names
            for model in ("tgi", "quotes"):
                messages = [{"role": "user", "content": "def f(x):"}]
                answer = client.chat.completions.create(model=model, messages=messages, max_tokens=4)  # type: ignore[call-overload]
                assert answer.model == model
                assert answer.usage.prompt_tokens < 8
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="other", prompt="x")
        server.signal(signal.SIGTERM)
        assert server.wait() == Exit.OK
