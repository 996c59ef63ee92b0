"""The prompts of the Medusa heads: what visitors ask in a chat, and the adapters' tasks with an instruction.

python -m lorikeet.demo.smollm2.prompts > prompts.jsonl
"""

import json
import random

from lorikeet.demo.smollm2.tasks import TASKS, examples
from lorikeet.demo.smollm2.words import Choice

COUNT = 480
Conversation = list[dict[str, str]]

_TOPICS = {
    False: (
        "tea", "the moon", "bees", "bicycles", "glaciers", "chess", "volcanoes", "bread", "jazz", "the Roman Empire",
        "solar panels", "dolphins", "vaccines", "maps", "rainbows", "libraries", "the human heart", "trains",
        "coral reefs", "algebra", "gardening", "earthquakes", "owls", "cheese", "gravity", "photography", "rivers",
        "Python programming", "swimming", "the French Revolution", "recycling", "dinosaurs", "sleep", "cooking rice",
        "the Internet", "wind", "tomatoes", "budgeting", "poetry", "electric cars",
    ),
    True: (
        "coffee", "the sun", "ants", "aeroplanes", "deserts", "football", "hurricanes", "pasta", "opera",
        "ancient Egypt", "batteries", "penguins", "antibiotics", "telescopes", "snow", "museums", "the human brain",
        "ships", "forests", "geometry",
    ),
}  # fmt: skip
"""By whether they are held out."""
_QUESTIONS = (
    "What is interesting about {topic}?",
    "Explain {topic} to a child.",
    "Give me three facts about {topic}.",
    "Write a short story about {topic}.",
    "Write a short poem about {topic}.",
    "Why are people interested in {topic}?",
    "Write an e-mail to a friend about {topic}.",
    "What should a beginner know about {topic}?",
    "List five questions about {topic} for a quiz.",
    "Give me some tips about {topic}.",
    "Summarize the history of {topic} in a few sentences.",
    "Hello! Can you tell me something about {topic}?",
    "What are the pros and cons of {topic}?",
    "How would you describe {topic} in two sentences?",
)
_CHATS = 0.6
"""Share of the prompts that are chats."""
_NOT_SERVED = "pirate"


def chats(count: int, *, held_out: bool) -> list[Conversation]:
    """Different questions about topics; every call gives equal ones."""
    choice = Choice(f"chat {'held out' if held_out else 'training'}", held_out=held_out)
    pairs = [(question, topic) for question in _QUESTIONS for topic in _TOPICS[held_out]]
    chosen = choice.random.sample(pairs, count)
    return [[{"role": "user", "content": question.format(topic=topic)}] for question, topic in chosen]


def prompts(count: int, *, held_out: bool) -> list[Conversation]:
    """Chats, and the adapters' tasks for the model alone, in random order."""
    num_chats = round(count * _CHATS)
    found = chats(num_chats, held_out=held_out)
    tasks = [task for task in TASKS if task != _NOT_SERVED]
    for number, task in enumerate(tasks):
        share = len(range(number, count - num_chats, len(tasks)))
        found += [example.base_messages() for example in examples(task, share, held_out=held_out)]
    random.Random(0).shuffle(found)
    return found


if __name__ == "__main__":
    for conversation in prompts(COUNT, held_out=False):
        print(json.dumps({"messages": conversation}))
