"""Tiny transformers in plain torch, built from the configs in `configs.py`.

Like Llama: grouped-query attention, a gated feed-forward part, RMSNorm before each; like Mixtral: experts in place of
the feed-forward part, those of a layer stacked, as grouped kernels want them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from tests.torch.configs import Config


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Causal grouped-query attention. `core` computes it from heads; context parallelism puts its own there."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, heads, kv_heads = (
            config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
        )
        self.head_dim = hidden // heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)
        self.core: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = causal_attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The head count is left open: under tensor parallelism a rank sees its own heads only.
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.core(q, k, v).transpose(1, 2).flatten(-2))


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """The experts that one rank holds, `count` of them, as stacked matrices."""

    def __init__(self, config: Config, count: int) -> None:
        super().__init__()
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        self.gate = nn.Parameter(torch.randn(count, intermediate, hidden) / hidden**0.5)
        self.up = nn.Parameter(torch.randn(count, intermediate, hidden) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, intermediate) / intermediate**0.5)

    def forward(self, x: torch.Tensor, tokens_per_expert: list[int]) -> torch.Tensor:
        done = [
            functional.silu(part @ gate.T) * (part @ up.T) @ down.T
            for part, gate, up, down in zip(x.split(tokens_per_expert), self.gate, self.up, self.down, strict=True)
        ]
        return torch.cat(done)


class Moe(nn.Module):
    """Top-k experts spread over the ranks of `group`: counts, dispatch and combine by all-to-all, as torchtitan does.

    With `balanced` the tokens go round the experts in turn, so that every rank receives as much as it sends; the weights
    still come from the router, which trains as usual.
    """

    def __init__(self, config: Config, group: ProcessGroup, *, balanced: bool) -> None:
        super().__init__()
        self.group, self.balanced = group, balanced
        self.count, self.top_k = config["num_local_experts"], config["num_experts_per_tok"]
        self.router = nn.Linear(config["hidden_size"], self.count, bias=False)
        self.experts = Experts(config, self.count // group.size())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).softmax(-1)
        chosen = scores.topk(self.top_k, -1).indices
        if self.balanced:
            chosen = torch.arange(chosen.numel()).view_as(chosen) % self.count
        order = chosen.flatten().argsort(stable=True)
        sent = tokens[order // self.top_k]
        ranks = self.group.size()
        counts = torch.bincount(chosen.flatten(), minlength=self.count)
        arriving = all_to_all_single(counts, None, None, self.group).view(ranks, -1)
        in_splits, out_splits = counts.view(ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
        received = all_to_all_single_autograd(sent, out_splits, in_splits, self.group)
        # What arrives is sorted by sender, then expert; the experts want it by expert.
        owner = torch.arange(arriving.shape[1]).repeat(ranks).repeat_interleave(arriving.flatten())
        by_expert = owner.argsort(stable=True)
        done = self.experts(received[by_expert], arriving.sum(0).tolist())
        back = all_to_all_single_autograd(done[by_expert.argsort()], in_splits, out_splits, self.group)
        weights = scores.gather(-1, chosen).flatten()[order]
        mixed = torch.zeros_like(tokens).index_add(0, order // self.top_k, back * weights[:, None])
        return mixed.view_as(x)


class Layer(nn.Module):
    def __init__(self, config: Config, ffn: nn.Module) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config["hidden_size"])
        self.attention = Attention(config)
        self.post_norm = RMSNorm(config["hidden_size"])
        self.ffn = ffn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x))
        return x + self.ffn(self.post_norm(x))


class Transformer(nn.Module):
    """Some layers, with the embedding before and the norm and head after where `first` and `last` say so."""

    def __init__(
        self,
        config: Config,
        layers: int | None = None,
        *,
        first: bool = True,
        last: bool = True,
        ffn: Callable[[Config], nn.Module] = Mlp,
    ) -> None:
        super().__init__()
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        self.embed_tokens = nn.Embedding(vocab, hidden) if first else None
        self.layers = nn.ModuleList(
            Layer(config, ffn(config)) for _ in range(config["num_hidden_layers"] if layers is None else layers)
        )
        self.final_norm = RMSNorm(hidden) if last else None
        self.lm_head = nn.Linear(hidden, vocab, bias=False) if last else None
        if config["tie_word_embeddings"] and self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for layer in self.layers:
            x = layer(x)
        if self.final_norm is not None and self.lm_head is not None:
            x = self.lm_head(self.final_norm(x))
        return x


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
