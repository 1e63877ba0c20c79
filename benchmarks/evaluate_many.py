"""How many evaluations a second `evaluate_many` makes, on one core.

    python benchmarks/evaluate_many.py

Two tables: all legal degrees of Llama-3.1 70B on 512 H100 at two batch sizes, which is what a sweep looks like, and the
same rows with every model of six mixed in, so that less is shared.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import time

import numpy as np
import pandas as pd

from shardwise import evaluate_many

MODELS = ("llama-3.1-70b", "llama-3.1-8b", "gpt-3-175b", "qwen3-32b", "llama-3.1-405b", "mistral-large-2407-123b")
REPEATS = 3


def sweep(models: tuple[str, ...]) -> pd.DataFrame:
    """Rows of every combination, models taken in turn."""
    rows = [
        {"tp": tp, "pp": pp, "cp": cp, "vpp": vpp, "micro_batch": micro, "zero": zero, "recompute": mode}
        for tp, pp, cp, vpp, micro, zero, mode in itertools.product(
            (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 5), (1, 2, 4, 8), (0, 1), ("none", "selective", "full")
        )
        if vpp == 1 or pp > 1
    ]
    frame = pd.DataFrame(rows * 2)
    frame["model"] = [models[i % len(models)] for i in range(len(frame))]
    frame["global_batch"] = np.repeat([512, 1024], len(rows))
    return frame.assign(cluster="dgx-h100:64", seq_len=8192)


def main() -> None:
    print(f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}, pandas {pd.__version__}")
    for name, models in (("one model", MODELS[:1]), ("six models", MODELS)):
        table = sweep(models)
        evaluate_many(table.head(10))
        seconds = []
        for _ in range(REPEATS):
            started = time.process_time()
            done = evaluate_many(table)
            seconds.append(time.process_time() - started)
        timed = int(done.step_time_s.notna().sum())
        median = statistics.median(seconds)
        print(
            f"{name}: {len(table)} rows ({timed} with a time) in {median:.2f} s CPU: {len(table) / median:,.0f} a second"
        )


if __name__ == "__main__":
    main()
