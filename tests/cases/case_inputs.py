"""What the cases are made of: evaluations by words, nodes of any accelerator, models of no catalogue row."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardwise.data.cluster import Cluster, Domain
from shardwise.data.cluster_catalog import load_accelerator, load_link
from shardwise.data.hf_config import model_from_config
from shardwise.solver.default_plan import degrees_from, plan_from_degrees
from shardwise.solver.evaluate import Evaluation, evaluate
from shardwise.solver.solve import build_instance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.data.model import Model
    from shardwise.data.pipeline import Schedule
    from shardwise.data.plan import Recompute
    from shardwise.data.workload import Training


def evaluated(
    model: Model | str,
    cluster: Cluster | str,
    workload: Training,
    *,
    rules: str = "megatron-core",
    profile: str | None = None,
    recompute: Recompute = "none",
    stages: Sequence[int] | None = None,
    schedule: Schedule | None = None,
    **degrees: Any,
) -> Evaluation:
    """What `shardwise evaluate` finds, the degrees that are not given filled in as it does."""
    instance = build_instance(model, cluster, workload, rules=rules, profile=profile)
    filled = degrees_from(instance, **degrees)
    plan = plan_from_degrees(instance, filled, recompute=recompute, stages=stages, schedule=schedule)
    return evaluate(instance, plan)


def nodes(accelerator: str, devices: int, inside: str, count: int = 1, between: str = "ib-hdr") -> Cluster:
    """`count` nodes of `devices` accelerators of the catalogue, and links of it."""
    device = load_accelerator(accelerator)
    members = tuple(Domain(f"node-{i}", "node", load_link(inside), device, devices) for i in range(count))
    if count == 1:
        return Cluster("nodes", members[0])
    return Cluster("nodes", Domain("fabric", "fabric", load_link(between), children=members))


def llama_like(layers: int, hidden: int, heads: int, kv_heads: int, width: int, vocab: int) -> Model:
    """A Llama of any shape, embeddings untied."""
    config = {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": width, "vocab_size": vocab,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return model_from_config(config, "llama-like")


def gpt_like(layers: int, hidden: int, heads: int, vocab: int, positions: int = 2048) -> Model:
    """A GPT-2 of any shape, embeddings tied."""
    config = {
        "model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": vocab,
        "n_positions": positions,
    }  # fmt: skip
    return model_from_config(config, "gpt-like")


@lru_cache(maxsize=8)
def bloom_like(layers: int, hidden: int = 14336, heads: int = 64) -> Model:
    """BLOOM's family at another depth or width."""
    config = {
        "model_type": "bloom", "n_layer": layers, "hidden_size": hidden, "n_head": heads, "vocab_size": 250680,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return model_from_config(config, "bloom-like")


def states_bytes(evaluation: Evaluation, stage: int = 0) -> float:
    """Weights, gradients and optimizer states of one device of a stage."""
    memory = evaluation.stages[stage]
    return memory.weights + memory.gradients + memory.optimizer
