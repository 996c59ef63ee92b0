"""`python -m lorikeet.launcher.config.reference` writes docs/launcher.md."""

from lorikeet.launcher.config.flag import Flag
from lorikeet.launcher.config.flags import GROUPS
from lorikeet.launcher.exits import MEANINGS

_HEAD = """# `lorikeet-launcher`

Made by `make docs` from the table in `launcher/flags/`. Names, variables, defaults and meaning are LoRAX's; a row says
where they are not. Flags marked *new* are not in LoRAX.

- A flag goes before its variable. A variable without text counts as not set. `--switch` takes no value; flags of kind
  *true or false* take one, as in LoRAX. Variables of either kind understand `true`, `false`, `1`, `0`, `yes`, `no`,
  `on` and `off`. Flags that may be repeated read several values from their variable, with commas between them
  (`LOCAL_ADAPTER_ROOT`: colons).
- `--config FILE` is YAML that gives flags by their names (`speculative-tokens: 3`; a list repeats a flag), or the keys
  by which AutoGluon-RAG describes a generator ([seeds.md](seeds.md)). Flags and variables go before it.
- Bytes are written as `1073741824`, `512MiB` or `4GiB`.
- An unknown flag, a wrong value or an impossible combination ends the launcher with one sentence, before anything is
  downloaded or started.
- Flags without effect are accepted, each with one warning when it is given. Refused flags end the launcher by name,
  unless their value asks for nothing (`--num-shard 1`).
"""

_TAIL = """
## Other variables

| variable | meaning |
|---|---|
| `HF_TOKEN`, `HUGGING_FACE_HUB_TOKEN`, `HF_API_TOKEN` | token for private and gated models; the first that is set |
| `HF_HUB_OFFLINE` | `1` takes models and adapters from the cache alone, adapters for every caller |
| `ADMIN_KEY` | the administrator's key, in place of `--admin-key-file` |
| `REQUEST_LOGGER_URL` | gets a POST for every request that generated something ([usage.md](usage.md)) |
| `HF_ENDPOINT` | another hub |
| `HF_HUB_DOWNLOAD_TIMEOUT` | seconds that a hub may say nothing, 10 by default |
| `HF_HOME` | where the cache is without `--huggingface-hub-cache` |
| `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION` | credentials of the source `s3` |
| `S3_ENDPOINT_URL`, `R2_ACCOUNT_ID` | another store than Amazon's, or Cloudflare's |

## Models

`--model-id` is a folder where there is one of that name, else a hub id, with a revision if it has the form
`id@revision`. Safetensors are preferred; `.bin` files are fetched only where there are none. A hub that cannot be asked
is no error if the cache holds the whole model: a warning says so.

`--draft-model-id` is found in the same way. A draft model guesses in the base model's token ids, so its vocabulary is
compared with the base's before anything is loaded, token by token; another one ends the launcher, naming both. So does
another vocabulary of `--draft-tokenizer-id`, which says whose tokenizer the draft model has.

## From Python, and in a terminal

```python
from launcher import launch

with launch("owner/model", draft_model_id="owner/small", dtype="bfloat16") as client:  # any flag, with underscores
    print(client.generate("def add(a, b):", max_new_tokens=32).text)
    print(client.chat("Say it in Python.", max_tokens=32)["choices"][0]["message"]["content"])
    for token in client.stream("import os", max_new_tokens=32, speculative_method="lookup"):
        print(token.text, token.source)
```

`launch` starts the processes on a free port of the loopback, waits until they are ready, and ends them with the block;
a server that does not start raises an error that holds its last lines. `launcher.Client(url)` talks to any server.

`lorikeet-generate PROMPT --url http://127.0.0.1:3000` writes one text as it comes (`--help` lists the fields of a
request); `-v` colours its tokens by who brought them, and counts guesses, steps and seconds.

`lorikeet-replay RECEIPT --url http://127.0.0.1:3000` asks for the text of a receipt again and says whether the tokens
are the same ([receipts.md](receipts.md)).

## Start and end

The launcher makes a private folder (0700), writes one configuration file per process, starts a shard and the router,
and says that it is ready when `GET /ready` is. SIGTERM or Ctrl-C: the router takes no more requests and lets running
ones finish for up to `--drain-timeout-s`; then the shard ends. A second signal ends everything at once, but not within
half a second of the first: `timeout`, terminals and service managers send several at once and mean one. They may go to
the launcher alone or to all its processes. A process that dies while serving is started again; what a shard computed
goes on elsewhere, or waits for it ([recovery.md](recovery.md)). No process outlives the launcher, even when it is
killed. SIGUSR2 replaces every process while the server goes on.
"""


def text() -> str:
    """The whole page."""
    parts = [_HEAD]
    for title, flags in GROUPS.items():
        parts.append(f"\n## {title}\n\n| flag | variable | kind | default | meaning |\n|---|---|---|---|---|\n")
        parts += [_row(flag) for flag in flags]
    parts.append(_TAIL)
    parts.append("\n## Exit codes\n\n| code | reason | meaning |\n|---|---|---|\n")
    parts += [f"| {exit.value} | {exit.name} | {meaning} |\n" for exit, meaning in MEANINGS.items()]
    return "".join(parts)


def _row(flag: Flag) -> str:
    name = f"`--{flag.name}`" + (f", `-{flag.short}`" if flag.short else "") + ("" if flag.lorax else " *new*")
    kind = flag.kind.value + (", repeated" if flag.repeated else "")
    meaning = flag.meaning
    if flag.choices:
        meaning += ": " + ", ".join(f"`{choice}`" for choice in flag.choices)
    if flag.differs:
        meaning += f". **Differs:** {flag.differs}"
    if flag.no_effect:
        meaning += f". **No effect{f' on {flag.no_effect_on}' if flag.no_effect_on else ''}:** {flag.no_effect}"
    if flag.refused:
        meaning += f". **Refused:** {flag.refused}"
    variable = f"`{flag.environment}`" if flag.variable else "–"
    return f"| {name} | {variable} | {kind} | {flag.shown_default} | {meaning} |\n"


if __name__ == "__main__":
    print(text(), end="")
