"""On-policy distillation: a student learns from a frozen teacher's judgement of its own rollouts.

    import opd

    config = opd.load_config("quickstart", ["steps=100"])
    summary = opd.train(config, out="runs/mine")

Names are imported when first used, so that `import opd` stays quick and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opd.config import RunConfig, load_config
    from opd.errors import UserError
    from opd.evaluation import evaluate
    from opd.records import Prompt, Rollout, ScoreRequest, Scores, Term, Turn
    from opd.training import train

_HOME = {
    "RunConfig": "opd.config",
    "load_config": "opd.config",
    "UserError": "opd.errors",
    "evaluate": "opd.evaluation",
    "Prompt": "opd.records",
    "Rollout": "opd.records",
    "ScoreRequest": "opd.records",
    "Scores": "opd.records",
    "Term": "opd.records",
    "Turn": "opd.records",
    "train": "opd.training",
}

__all__ = [
    "Prompt",
    "Rollout",
    "RunConfig",
    "ScoreRequest",
    "Scores",
    "Term",
    "Turn",
    "UserError",
    "evaluate",
    "load_config",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'opd' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
