"""lm-eval: log likelihoods over completions equal those of its transformers backend; texts over both routes."""

import os

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

os.environ["OPENAI_API_KEY"] = os.environ["KEY"]
url, base = os.environ["URL"], os.environ["BASE"]
given = {"model": os.environ["MODEL"], "max_retries": 1, "num_concurrent": 2, "max_length": 512}
texts = {**given, "add_bos_token": False, "auth_token": os.environ["KEY"]}
pairs = [("def add(a, b):", " return a + b"), ("import", " os"), ("The answer is", " 42"), ("x" * 40, " y = 1\n")]


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


local = HFLM(pretrained=base, device="cpu", dtype="float32", batch_size=1, add_bos_token=False)
expected = local.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
for tokenizer in ("huggingface", "remote"):
    remote = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        tokenizer_backend=tokenizer,
        tokenizer=base if tokenizer == "huggingface" else None,
        custom_prefix_token_id=local.prefix_token_id,  # over HTTP it takes a token with the id 0 as none
        **texts,
    )
    found = remote.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    for (wanted, is_greedy), (value, same) in zip(expected, found, strict=True):
        assert abs(wanted - value) < 1e-3 and bool(is_greedy) == bool(same), (expected, found)
rolling = instances("loglikelihood_rolling", [("def add(a, b):\n    return a + b\n",)])
wanted, value = local.loglikelihood_rolling(rolling)[0], remote.loglikelihood_rolling(rolling)[0]
assert abs(wanted - value) < 1e-3, (wanted, value)
until = [("def add(a, b):", {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False})]
assert remote.generate_until(instances("generate_until", until), disable_tqdm=True)
chat = LocalChatCompletion(base_url=f"{url}/v1/chat/completions", **given)
message = chat.apply_chat_template([{"role": "user", "content": "def add(a, b):"}])
assert chat.generate_until(instances("generate_until", [(message, until[0][1])]), disable_tqdm=True)
print("lm-eval")
