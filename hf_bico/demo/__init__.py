"""The embedded small world: small open_clip models and data sets, made on the spot and offline."""

from hf_bico.demo.digits import CLASS_NAMES, EASY_TASK, TASKS, Task
from hf_bico.demo.world import SHAPES, Shape, World, build, fine_tune, pretrain, write_data

__all__ = [
    "CLASS_NAMES",
    "EASY_TASK",
    "SHAPES",
    "TASKS",
    "Shape",
    "Task",
    "World",
    "build",
    "fine_tune",
    "pretrain",
    "write_data",
]
