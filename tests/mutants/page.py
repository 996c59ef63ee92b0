"""Faults of the page in the browser. The tests that notice them need chromium and run in `make test-long`."""

from tests.mutants.mutant import Mutant

UI, PAGE = "router/ui", "tests/e2e/page"

MUTANTS = [
    Mutant(
        "paths ignore the path prefix",
        f"{UI}/api.js",
        'export const ROOT = new URL("./", document.baseURI);',
        'export const ROOT = new URL("/", document.baseURI);',
        f"{PAGE}/test_access.py::test_it_works_behind_a_path_prefix",
        is_long=True,
    ),
    Mutant(
        "the API key is stored beyond the browser tab",
        f"{UI}/api.js",
        "set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),",
        "set: (value) => (localStorage.setItem(KEY, value), sessionStorage.setItem(KEY, value)),",
        f"{PAGE}/test_access.py::test_a_key_stays_in_the_tab",
        is_long=True,
    ),
    Mutant(
        "an excluded token has probability 1",
        f"{UI}/answers/tokens.js",
        "const isExcluded = (logprob) => logprob === null || logprob === undefined;",
        "const isExcluded = (logprob) => logprob === undefined;",
        f"{PAGE}/test_answers.py::test_the_details_of_a_token",
        is_long=True,
    ),
    Mutant(
        "accepted history drafts are shown as the model's own tokens",
        f"{UI}/answers/tokens.js",
        'const OWN = { prefill: "target",',
        'const OWN = { history: "target", prefill: "target",',
        f"{PAGE}/test_answers.py::test_every_source_has_a_colour_and_a_number",
        is_long=True,
    ),
    Mutant(
        "the first difference is marked one token late",
        f"{UI}/answers/tokens.js",
        "if (tokens[index].id !== others[index].id) return index;",
        "if (tokens[index].id !== others[index].id) return index + 1;",
        f"{PAGE}/test_answers.py::test_the_first_difference_of_two_adapters_is_marked",
        is_long=True,
    ),
    Mutant(
        "Stop leaves the request running in the shard",
        f"{UI}/answers/answer.js",
        'await send(`v1/streams/${answer.id}`, { method: "DELETE" }).catch(() => {});',
        "await Promise.resolve();",
        f"{PAGE}/test_streams.py::test_a_stopped_answer_is_cancelled_in_the_shard",
        is_long=True,
    ),
    Mutant(
        "a resumed stream is appended to the part that was stored",
        f"{UI}/answers/answer.js",
        "if (isKept) Object.assign(answer, structuredClone(NOTHING));",
        "",
        f"{PAGE}/test_streams.py::test_the_kept_part_is_shown_until_the_rest_comes",
        is_long=True,
    ),
    Mutant(
        "an answer stops being saved when another conversation is opened",
        f"{UI}/playground/autosave.js",
        "if (isRunning(conversation)) this.running.set(conversation.id, conversation);",
        "",
        f"{PAGE}/test_streams.py::test_a_running_conversation_is_found_as_it_is",
        is_long=True,
    ),
    Mutant(
        "frequency and presence penalties change places",
        f"{UI}/answers/answer.js",
        "if (frequency) fields.frequency_penalty = frequency;\n  if (presence) fields.presence_penalty = presence;",
        "if (frequency) fields.presence_penalty = frequency;\n  if (presence) fields.frequency_penalty = presence;",
        f"{PAGE}/test_requests.py::test_settings_reach_the_request_and_the_shard",
        is_long=True,
    ),
    Mutant(
        "a link in an answer may run a script",
        f"{UI}/answers/markdown.js",
        "const SCHEMES = /^(https?:|mailto:)/i;",
        "const SCHEMES = /^/;",
        f"{PAGE}/test_answers.py::test_a_script_in_an_answer_is_text",
        is_long=True,
    ),
    Mutant(
        "a message is sent while the model loads",
        f"{UI}/playground/playground.js",
        "if (!this.status.isReady) return this.status.check();",
        "",
        f"{PAGE}/test_conversations.py::test_a_loading_model_is_waited_for",
        is_long=True,
    ),
    Mutant(
        "files that an administrator sends replace an adapter",
        "router/api/routes/adapter_files.py",
        "    if folder.exists():\n        shutil.rmtree(arrived)",
        "    if folder.exists() and not folder.is_dir():\n        shutil.rmtree(arrived)",
        "tests/router/api/routes/test_adapter_files.py::test_a_folder_is_never_replaced",
    ),
]
