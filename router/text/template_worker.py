"""Renders chat templates in a process of its own, with a limit on memory.

Run as `python -m lorikeet.router.text.template_worker`, it answers each line of JSON with another until its input ends.
It starts while a request waits, so it imports little.
"""

import json
import resource
import sys

from lorikeet.router.errors import ChatTemplateError
from lorikeet.router.text.chat_template import ChatTemplate, TemplateOptions

MAX_PROMPT = 8 << 20
_MAX_MEMORY = 1 << 30


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        question = json.loads(line)
        try:
            template = ChatTemplate(question["template"], question["special_tokens"])
            options = TemplateOptions(question["variables"], question["continue_final_message"])
            text, unread = template.render(question["messages"], options), template.unread(options.variables)
            answer = (
                {"text": text, "unread": unread} if len(text) <= MAX_PROMPT else {"error": "the prompt is too long"}
            )
        except ChatTemplateError as error:
            answer = {"error": error.message}
        except MemoryError:
            answer = {"error": "the template needs too much memory"}
        except Exception as error:  # a template may raise anything
            answer = {"error": type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
