"""The table of tasks: a config's `name` to what draws and scores its examples."""

from collections.abc import Callable
from typing import Any

from hyla_core.config import TaskConfig
from hyla_core.tasks.base import Batch, Task
from hyla_core.tasks.fuzzy_logic import FuzzyLogic
from hyla_core.tasks.language import Language
from hyla_core.tasks.sraven import Sraven

__all__ = ["TASKS", "Batch", "Task", "make_task"]

TASKS: dict[str, Callable[[Any], Task]] = {"sraven": Sraven, "fuzzy_logic": FuzzyLogic, "language": Language}
"""What a config's `name` stands for. A new task is one file, a config in `hyla_core.config`, and one line here."""


def make_task(config: TaskConfig) -> Task:
    """The task that a config describes."""
    return TASKS[config.name](config)
