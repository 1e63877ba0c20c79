"""Small instances for the cross-checks, drawn by hypothesis."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from shardwise.data.cluster import Accelerator, Cluster, Domain, Link
from shardwise.data.cluster_catalog import load_accelerator
from shardwise.data.instance import Instance
from shardwise.data.limits import parse_limits, variable_of
from shardwise.data.model import LayerKind, Mamba, Model
from shardwise.data.model_parts import attention, layer, linear, mamba2, mlp, moe, norm
from shardwise.data.rules import FREE, MEGATRON_CORE
from shardwise.data.workload import Training

INNER = Link("inner", "nvlink", 450e9, 2e-6)
MIDDLE = Link("middle", "infiniband", 50e9, 4e-6)
OUTER = Link("outer", "infiniband", 12.5e9, 8e-6, oversubscription=2.0)


def kinds_of(hidden: int, heads: int, kv_heads: int) -> list[LayerKind]:
    """A dense layer, a feed-forward layer without a mixer, a wide one, experts, and a Mamba layer."""
    mixer = attention(hidden, heads, kv_heads, 64)
    return [
        layer(hidden, mixer, mlp(hidden, 4 * hidden, gated=True)),
        layer(hidden, None, mlp(hidden, 3 * hidden, gated=False)),
        layer(hidden, mixer, mlp(hidden, 8 * hidden, gated=True)),
        layer(hidden, mixer, moe(hidden, 4, 2, hidden)),
        layer(hidden, mamba2(hidden, Mamba(2, 2 * hidden, 64, 4, 4, 2 * hidden // 64)), None),
    ]


def model_of(kinds: list[LayerKind], hidden: int, vocab: int, *, tied: bool) -> Model:
    head = norm("final_norm", hidden)
    if not tied:
        head += linear("lm_head", vocab, hidden, "vocab")
    embedding = linear("embed_tokens", vocab, hidden, "vocab")
    return Model("small", "small", hidden, vocab, tied, tuple(kinds), embedding, head)


@st.composite
def models(draw: st.DrawFn, *, most_layers: int = 6) -> Model:
    hidden = draw(st.sampled_from([512, 1024, 2048, 4096]))
    heads = draw(st.sampled_from([4, 8, 12]))
    pool = kinds_of(hidden, heads, draw(st.sampled_from([1, 2, heads])))
    chosen = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3, unique=True))
    layers = draw(st.lists(st.sampled_from(chosen), min_size=1, max_size=most_layers))
    return model_of(layers, hidden, draw(st.sampled_from([1000, 32000, 128000])), tied=draw(st.booleans()))


def leaf(accelerator: Accelerator, devices: int) -> Domain:
    return Domain(f"node-{devices}", "node", INNER, accelerator, devices)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    memory = int(draw(st.sampled_from([3, 4, 6, 10, 20, 80])) * draw(st.floats(0.8, 1.2)) * 1e9)
    accelerator = replace(load_accelerator("h100-sxm"), memory_bytes=memory)
    depth = draw(st.integers(1, 3))
    if depth == 1:
        root = leaf(accelerator, draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8])))
    elif depth == 2:
        nodes = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=4))
        root = Domain("fabric", "fabric", MIDDLE, children=tuple(leaf(accelerator, n) for n in nodes))
    else:
        rack = Domain("rack", "rack", MIDDLE, children=(leaf(accelerator, 2),) * 2)
        root = Domain("spine", "spine", OUTER, children=(rack,) * draw(st.sampled_from([2, 3])))
    return Cluster("small", root)


LIMITS = (
    "micro_batch<=1", "micro_batch<=2", "vpp<=1", "vpp<=2", "vpp>=2", "zero=0", "zero=1", "tp<=2", "tp>=2", "pp<=2",
    "pp>=2", "dp<=2", "sequence_parallel=0", "sequence_parallel=1", "devices<=6", "recompute=none", "recompute=full",
    "recompute=selective",
)  # fmt: skip


@st.composite
def instances(draw: st.DrawFn, *, most_layers: int = 6) -> Instance:
    model = draw(models(most_layers=most_layers))
    workload = Training(
        draw(st.sampled_from([512, 2048, 4096])),
        draw(st.sampled_from([2, 4, 6, 8, 12])),
        attention=draw(st.sampled_from(["flash", "unfused"])),
    )
    chosen = draw(st.lists(st.sampled_from(LIMITS), min_size=1, max_size=4, unique_by=variable_of))
    limits = parse_limits(chosen)
    rules = draw(st.sampled_from([MEGATRON_CORE, FREE]))
    return Instance(model, draw(clusters()), workload, rules=rules, limits=limits)
