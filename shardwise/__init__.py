"""shardwise: proven hybrid-parallel plans for large language models.

Names are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.data.cluster_catalog import load_cluster
    from shardwise.data.faults import InputError
    from shardwise.data.instance import Instance
    from shardwise.data.model_catalog import load_model
    from shardwise.data.plan import Degrees, Placement, Plan, Stage
    from shardwise.data.workload import Training
    from shardwise.solver.batch import BatchProgress, BatchResult, batch
    from shardwise.solver.collective import collective
    from shardwise.solver.evaluate import Evaluation, evaluate
    from shardwise.solver.fit import Fit, fit
    from shardwise.solver.many import evaluate_many
    from shardwise.solver.result import Progress, Result
    from shardwise.solver.simulate import Simulation, simulate
    from shardwise.solver.solve import build_instance, solve
    from shardwise.solver.store import load_store, stored_result
    from shardwise.solver.trace import chrome_trace
    from shardwise.solver.training_run import TrainingRun, training_run
    from shardwise.solver.validate import Validation, validate

__version__ = "0.1.0"

_HOMES = {
    "load_cluster": "shardwise.data.cluster_catalog",
    "InputError": "shardwise.data.faults",
    "Instance": "shardwise.data.instance",
    "load_model": "shardwise.data.model_catalog",
    "Degrees": "shardwise.data.plan",
    "Placement": "shardwise.data.plan",
    "Plan": "shardwise.data.plan",
    "Stage": "shardwise.data.plan",
    "Training": "shardwise.data.workload",
    "BatchProgress": "shardwise.solver.batch",
    "BatchResult": "shardwise.solver.batch",
    "batch": "shardwise.solver.batch",
    "collective": "shardwise.solver.collective",
    "Evaluation": "shardwise.solver.evaluate",
    "evaluate": "shardwise.solver.evaluate",
    "Fit": "shardwise.solver.fit",
    "fit": "shardwise.solver.fit",
    "evaluate_many": "shardwise.solver.many",
    "Progress": "shardwise.solver.result",
    "Result": "shardwise.solver.result",
    "Simulation": "shardwise.solver.simulate",
    "simulate": "shardwise.solver.simulate",
    "build_instance": "shardwise.solver.solve",
    "solve": "shardwise.solver.solve",
    "load_store": "shardwise.solver.store",
    "stored_result": "shardwise.solver.store",
    "chrome_trace": "shardwise.solver.trace",
    "TrainingRun": "shardwise.solver.training_run",
    "training_run": "shardwise.solver.training_run",
    "Validation": "shardwise.solver.validate",
    "validate": "shardwise.solver.validate",
}

__all__ = [
    "BatchProgress",
    "BatchResult",
    "Degrees",
    "Evaluation",
    "Fit",
    "InputError",
    "Instance",
    "Placement",
    "Plan",
    "Progress",
    "Result",
    "Simulation",
    "Stage",
    "Training",
    "TrainingRun",
    "Validation",
    "__version__",
    "batch",
    "build_instance",
    "chrome_trace",
    "collective",
    "evaluate",
    "evaluate_many",
    "fit",
    "load_cluster",
    "load_model",
    "load_store",
    "simulate",
    "solve",
    "stored_result",
    "training_run",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
