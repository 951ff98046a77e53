"""How many parameters a model and its adapters have, as a whole and on each rank, from the sizes in config.json."""

from __future__ import annotations

from dataclasses import dataclass

from lora_rl.config.model_files import ModelFacts

# Whose layers are counted below: attention, then a gated MLP or gated experts, with an RMS norm before each.
COUNTED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_NEEDED = (
    "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
    "tied_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder that are all known; see `ModelFacts`.

    Attributes:
        q, kv: width of all query heads, and of all key (or value) heads.
        ffn: inner width of the MLP, or of one expert.
        experts: per layer; 0 for a dense model.
        active_experts: those a token goes through; 1 for a dense model.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    experts: int
    active_experts: int

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int, int]]:
        """(inputs, outputs, copies) of each linear of a layer that can carry an adapter; gate and up are one."""
        copies = self.experts or 1
        return {
            "linear_qkv": (self.hidden, self.q + 2 * self.kv, 1),
            "linear_proj": (self.q, self.hidden, 1),
            "linear_fc1": (self.hidden, 2 * self.ffn, copies),
            "linear_fc2": (self.ffn, self.hidden, copies),
        }

    def embedding(self, parts: int = 1) -> int:
        """Parameters of the input embedding, or of an output layer, over `parts` ranks."""
        return self.vocab * self.hidden // parts

    def layer(self, parts: int = 1, ep: int = 1) -> int:
        """Parameters of one layer over `parts` tensor-parallel ranks: linears are shared, norms and routers whole.

        Args:
            ep: ranks over which the experts are spread.
        """
        shared = sum(i * o * (copies // ep if copies > 1 else 1) for i, o, copies in self.linears.values())
        shared += self.q + 2 * self.kv if self.qkv_bias else 0
        whole = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0) + self.hidden * self.experts
        return shared // parts + whole

    @property
    def total(self) -> int:
        """Parameters of the model; tied embeddings count once."""
        return self.embedding() * (1 if self.tied else 2) + self.layers * self.layer() + self.hidden

    def on_stage(self, stage: int, *, tp: int, pp: int, ep: int = 1) -> int:
        """Parameters of a rank of one pipeline stage. With tied embeddings the last stage has a copy of its own."""
        count = self.layers // pp * self.layer(tp, ep)
        if stage == 0:
            count += self.embedding(tp)
        if stage == pp - 1:
            count += self.hidden
            if pp > 1 or not self.tied:
                count += self.embedding(tp)
        return count

    def adapter(self, linear: str, rank: int) -> int:
        """Parameters of the adapter, A (rank x inputs) and B (outputs x rank), on one linear of one layer."""
        inputs, outputs, copies = self.linears[linear]
        return rank * (inputs + outputs) * copies


def shape_of(facts: ModelFacts | None) -> Shape | str:
    """The sizes, or why they cannot be counted, as the end of a sentence."""
    if facts is None:
        return "the sizes of the model are not known: it is not on this machine, and not among the described ones"
    if facts.model_type not in COUNTED:
        return f"models of type {facts.model_type} are not counted, only {', '.join(COUNTED)}"
    missing = [name for name in _NEEDED if getattr(facts, name) is None]
    if missing:
        return f"the model's config.json does not state {', '.join(missing)}"
    if facts.num_experts and not (facts.expert_size and facts.experts_per_token):
        return "the model's config.json does not state moe_intermediate_size and num_experts_per_tok"
    return Shape(
        hidden=facts.hidden_size or 0,
        layers=facts.num_layers or 0,
        heads=facts.num_heads or 0,
        kv_heads=facts.num_kv_heads or 0,
        head_dim=facts.head_dim or 0,
        ffn=(facts.expert_size if facts.num_experts else facts.intermediate_size) or 0,
        vocab=facts.vocab_size or 0,
        tied=bool(facts.tied_embeddings),
        qkv_bias=facts.qkv_bias,
        qk_norm=facts.qk_norm,
        experts=facts.num_experts or 0,
        active_experts=facts.experts_per_token or 1,
    )
