"""hf-bico: carry what a fine-tuned model learnt to another pretrained model, without training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_bico.utils import __version__ as __version__

if TYPE_CHECKING:
    from hf_bico.errors import BicoError as BicoError
    from hf_bico.experiments.compare.comparison import Comparison as Comparison
    from hf_bico.experiments.compare.run import compare as compare
    from hf_bico.experiments.diagnose.diagnosis import Diagnosis as Diagnosis
    from hf_bico.experiments.diagnose.run import diagnose as diagnose
    from hf_bico.experiments.reproduce.reproduction import Reproduction as Reproduction
    from hf_bico.experiments.reproduce.run import reproduce as reproduce
    from hf_bico.hub.push import Pushed as Pushed
    from hf_bico.hub.push import PushOptions as PushOptions
    from hf_bico.models.families import register_family as register_family
    from hf_bico.porting.evaluate import evaluate_model as evaluate_model
    from hf_bico.porting.plan import Plan as Plan
    from hf_bico.porting.planner import plan as plan
    from hf_bico.porting.port import port as port
    from hf_bico.porting.rerun import rerun as rerun
    from hf_bico.porting.result import Ported as Ported
    from hf_bico.porting.task_arithmetic import apply as apply
    from hf_bico.porting.task_arithmetic import extract as extract
    from hf_bico.porting.task_vector import TaskVector as TaskVector
    from hf_bico.settings import Settings as Settings
    from hf_bico.settings import register_method as register_method
    from hf_bico.utils.progress import show_progress as show_progress

# a name is imported when it is first used, so that `import hf_bico` loads no torch
_HOMES = {
    "BicoError": "hf_bico.errors",
    "Comparison": "hf_bico.experiments.compare.comparison",
    "Diagnosis": "hf_bico.experiments.diagnose.diagnosis",
    "Plan": "hf_bico.porting.plan",
    "Ported": "hf_bico.porting.result",
    "PushOptions": "hf_bico.hub.push",
    "Pushed": "hf_bico.hub.push",
    "Reproduction": "hf_bico.experiments.reproduce.reproduction",
    "Settings": "hf_bico.settings",
    "TaskVector": "hf_bico.porting.task_vector",
    "apply": "hf_bico.porting.task_arithmetic",
    "compare": "hf_bico.experiments.compare.run",
    "diagnose": "hf_bico.experiments.diagnose.run",
    "evaluate_model": "hf_bico.porting.evaluate",
    "extract": "hf_bico.porting.task_arithmetic",
    "plan": "hf_bico.porting.planner",
    "port": "hf_bico.porting.port",
    "register_family": "hf_bico.models.families",
    "reproduce": "hf_bico.experiments.reproduce.run",
    "register_method": "hf_bico.settings",
    "rerun": "hf_bico.porting.rerun",
    "show_progress": "hf_bico.utils.progress",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hf_bico' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
