"""Cells as tasks on a Ray cluster: an existing one, or one of this machine. The driver alone claims cells and writes the store.

Ray repeats a task whose worker or node is gone; the driver keeps few more tasks in flight than there are cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.data.faults import InputError
from shardwise.solver.cells import failed, solve_task
from shardwise.solver.solve import versions

if TYPE_CHECKING:
    from shardwise.solver.cells import Outcome, Task
    from shardwise.solver.engines import Done

RETRIES = 3
AHEAD = 2
"""Tasks beyond those that the cores hold, so that none waits for the driver."""


class RayEngine:
    """`solver.engines.Engine` on Ray. An address is that of RAY_ADDRESS, or of the cluster that `ray start` made here.

    Parameters
    ----------
    in_flight
        Tasks at once; without it, as many as the cores of the cluster hold, and `AHEAD`.
    threads
        Cores of a task.

    Raises
    ------
    InputError
        When Ray is not installed or the cluster cannot be reached.
    """

    def __init__(self, in_flight: int | None, threads: int) -> None:
        try:
            import ray
        except ImportError:
            raise InputError("engine=ray needs Ray: pip install 'shardwise[ray]'") from None
        self.ray: Any = ray
        self.in_flight, self.threads = in_flight, threads
        self.own = not ray.is_initialized()
        if self.own:
            try:
                ray.init(log_to_driver=False)
            except (ConnectionError, OSError, RuntimeError) as error:
                raise InputError(f"engine=ray: the cluster cannot be reached: {error}") from None
        self.solve = ray.remote(num_cpus=threads, max_retries=RETRIES)(solve_there)
        self.versions = versions()
        self.running: dict[Any, Task] = {}

    def idle(self) -> list[str | None]:
        cores = self.ray.cluster_resources().get("CPU", 0)  # nodes come and go
        most = self.in_flight or int(cores // self.threads) + AHEAD
        return [None] * max(most - len(self.running), 0)

    def submit(self, task: Task) -> None:
        self.running[self.solve.remote(task, self.versions)] = task

    def collect(self, timeout_s: float) -> Done:
        ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=timeout_s)
        return [self._take(reference) for reference in ready]

    def _take(self, reference: Any) -> tuple[Task, Outcome | None]:
        task = self.running.pop(reference)
        try:
            return task, self.ray.get(reference)
        except self.ray.exceptions.RayError:
            return task, None

    def close(self) -> None:
        for reference in self.running:
            self.ray.cancel(reference, force=True)
        if self.own:
            self.ray.shutdown()


def solve_there(task: Task, expected: dict[str, str]) -> Outcome:
    """Solve a cell where the task runs; other versions than the driver's would give other results under the same key."""
    here = versions()
    if here != expected:
        other = ", ".join(f"{name} {here[name]} not {expected[name]}" for name in here if here[name] != expected[name])
        return failed(task, (f"a worker of the cluster has other versions than the driver: {other}",))
    return solve_task(task)
