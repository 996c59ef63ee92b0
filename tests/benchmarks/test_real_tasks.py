"""The real tasks by themselves, without a server."""

import pytest

from benchmarks.speculation import real_tasks


@pytest.mark.parametrize("task", real_tasks.TASKS)
def test_every_task_has_prompts_of_its_own(task: str) -> None:
    prompts = real_tasks.TASKS[task]()
    assert len(set(prompts)) == real_tasks.PROMPTS and all(prompts)
