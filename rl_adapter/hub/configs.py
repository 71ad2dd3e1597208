"""How each family's config reads as the fields of a `types.Spec`, and which of its modules have biases.

A reader of a family takes a `Reader`, to which it adds all problems that it finds.
"""

from typing import Any

from rl_adapter.hub import rope
from rl_adapter.hub.reader import LARGEST, Reader
from rl_adapter.types import Mla

EXPERTS = ("gate", "up", "down")  # fields with one slice an expert
MLP = ("mlp_gate", "mlp_up", "mlp_down")
MOST_LAYERS = 2**12  # an untrusted count must not make tuples without end
Fields = dict[str, Any]  # of `types.Spec`
Biases = tuple[str, ...]


def _common(c: Reader, head_dim: int = 0, theta: float | None = None, partial: float | None = None, mla: bool = False) -> Fields:
    """What all families have. `head_dim`, `theta`, `partial`: where the config has none (0: d_model / heads; None: theta is needed)."""
    c.only("hidden_act", "silu")
    fields = {
        "layers": c.integer("num_hidden_layers", high=MOST_LAYERS),
        "d_model": c.integer("hidden_size"),
        "heads": c.integer("num_attention_heads"),
        "vocab": c.integer("vocab_size"),
        "norm_eps": c.number("rms_norm_eps"),
        "tie_embeddings": c.flag("tie_word_embeddings", default=False),
        "max_positions": c.integer("max_position_embeddings"),
    }
    if not mla:
        width = c.integer("head_dim", default=head_dim or max(1, fields["d_model"] // fields["heads"]), high=rope.WIDEST)
        kv_heads = c.integer("num_key_value_heads", default=fields["heads"])
        c.relate(fields["heads"] % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, {fields['heads']}")
        if width > rope.WIDEST:
            c.problem("head_dim", width, f"at most {rope.WIDEST}")
            width = 2
        fields |= {"head_dim": width, "kv_heads": kv_heads, "rope": rope.read(c, width, theta, partial)[0]}
    return fields


def _dense(c: Reader, layers: int) -> Fields:
    return {"dense": tuple(range(layers)), "d_mlp": c.integer("intermediate_size")}


def _experts(c: Reader, count: str, alias: str, width: str, norm_topk_prob: bool | None = None) -> Fields:
    """`norm_topk_prob`: what the family does; None: the config says."""
    chosen = ("num_experts_per_tok", "experts_per_token")
    fields = {"experts": c.integer(count, alias), "experts_per_token": c.integer(*chosen), "d_expert": c.integer(width)}
    fields["norm_topk_prob"] = c.flag("norm_topk_prob") if norm_topk_prob is None else norm_topk_prob
    c.relate(
        fields["experts_per_token"] <= fields["experts"], chosen[0], fields["experts_per_token"], f"at most {count}, {fields['experts']}"
    )
    return fields


def _sigmoid_experts(c: Reader, layers: int) -> Fields:
    """The experts of DeepSeek-V3 (arXiv:2412.19437): grouped choice, shared experts, dense layers first."""
    for name, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        c.only(name, value)
    fields = _experts(c, "n_routed_experts", "num_local_experts", "moe_intermediate_size")
    groups, best = c.integer("n_group"), c.integer("topk_group")
    shared, first = c.integer("n_shared_experts", default=0, low=0), c.integer("first_k_dense_replace", low=0)
    c.relate(first <= layers, "first_k_dense_replace", first, f"at most num_hidden_layers, {layers}")
    c.relate(shared * fields["d_expert"] <= LARGEST, "n_shared_experts", shared, "a product with moe_intermediate_size below 2^31")
    c.relate(fields["experts"] % groups == 0, "n_group", groups, f"a divisor of n_routed_experts, {fields['experts']}")
    size = max(1, fields["experts"] // groups)
    c.relate(groups == 1 or size >= 2, "n_group", groups, "groups of at least two experts: the best two rank a group")
    c.relate(best <= groups, "topk_group", best, f"at most n_group, {groups}")
    chosen = fields["experts_per_token"]
    c.relate(chosen <= best * size, "num_experts_per_tok", chosen, f"at most the {best * size} experts of topk_group groups")
    fields |= {"score": "sigmoid", "routed_scale": c.number("routed_scaling_factor"), "expert_groups": groups, "groups_per_token": best}
    c.skip("intermediate_size")
    fields |= {"d_shared": shared * fields["d_expert"], "dense": tuple(range(min(first, layers)))}
    return fields | {"d_mlp": c.integer("intermediate_size") if first else 0}


def _windows(c: Reader, layers: int, window: int, default: list[str]) -> Fields:
    """The windows of layers of two kinds; `default`: the kinds where the config lists none. `window` 0: none is told."""
    kinds = c.sequence("layer_types")
    kinds = default if kinds is None else kinds
    c.relate(len(kinds) == layers, "layer_types", kinds, f"one for each of the {layers} layers")
    if not all(isinstance(kind, str) and kind in rope.LAYER_TYPES for kind in kinds):
        c.problem("layer_types", kinds, " or ".join(rope.LAYER_TYPES))
    elif "sliding_attention" in kinds:
        c.relate(window > 0, "sliding_window", None, "an integer of at least 1: layer_types has sliding_attention")
        return {"windows": tuple(window if kind == "sliding_attention" else 0 for kind in kinds)}
    return {}


def _switched_windows(c: Reader, layers: int) -> Fields:
    """Qwen's: a window counts only if it is switched on, and in the layers after the first `max_window_layers`."""
    used = c.flag("use_sliding_window", default=False)
    window = c.integer("sliding_window", default=0)
    first = c.integer("max_window_layers", default=28, low=0)
    sliding = [used and window > 0 and layer >= first for layer in range(layers)]
    return _windows(c, layers, window if used else 0, ["sliding_attention" if s else "full_attention" for s in sliding])


def _same_window(c: Reader, layers: int, default: int = 0) -> Fields:
    window = c.integer("sliding_window", default=0 if "sliding_window" in c.config else default)
    return {"windows": (window,) * layers} if window else {}


def _biases(c: Reader, **flags: str) -> Biases:
    """attention_bias="q k": these fields have a bias where the flag is set."""
    return tuple(field for flag, names in flags.items() if c.flag(flag, default=False) for field in names.split())


def qwen3_moe(c: Reader) -> tuple[Fields, Biases]:
    fields = _common(c) | _experts(c, "num_experts", "num_local_experts", "moe_intermediate_size") | {"qk_norm": "head"}
    c.only("use_sliding_window", False)
    c.skip("sliding_window", "max_window_layers", "intermediate_size")
    layers, step, only = fields["layers"], c.integer("decoder_sparse_step", default=1), c.sequence("mlp_only_layers") or []
    if all(isinstance(layer, int) and not isinstance(layer, bool) for layer in only):
        c.relate(all(0 <= layer < layers for layer in only), "mlp_only_layers", only, f"layers from 0 to {layers - 1}")
        named = set(only)
        fields["dense"] = tuple(layer for layer in range(layers) if layer in named or (layer + 1) % step)
        fields["d_mlp"] = c.integer("intermediate_size") if fields["dense"] else 0
    else:
        c.problem("mlp_only_layers", only, "a list of integers")
    return fields | _windows(c, layers, 0, ["full_attention"] * layers), _biases(c, attention_bias="q k v o")


def deepseek(c: Reader) -> tuple[Fields, Biases]:
    fields = _common(c, mla=True)
    mla = Mla(
        q_rank=c.integer("q_lora_rank", default=0),
        kv_rank=c.integer("kv_lora_rank", high=rope.WIDEST),
        nope=c.integer("qk_nope_head_dim", high=rope.WIDEST),
        rope=c.integer("qk_rope_head_dim", high=rope.WIDEST),
        v=c.integer("v_head_dim", high=rope.WIDEST),
    )
    c.only("num_key_value_heads", fields["heads"])
    c.only("head_dim", mla.rope)
    c.only("qk_head_dim", mla.nope + mla.rope)
    turned, mscale = rope.read(c, mla.rope, interleaved=c.flag("rope_interleave", default=True))
    fields |= {"mla": mla, "rope": turned, "kv_heads": 1, "head_dim": mla.kv_rank + mla.rope}
    fields["attention_scale"] = (mla.nope + mla.rope) ** -0.5 * mscale**2
    biases = _biases(c, attention_bias="q_a kv_a o")
    return fields | _sigmoid_experts(c, fields["layers"]), biases if mla.q_rank else tuple(b for b in biases if b != "q_a")


def glm4_moe(c: Reader) -> tuple[Fields, Biases]:
    fields = _common(c, partial=0.5)
    fields["qk_norm"] = "head" if c.flag("use_qk_norm", default=False) else "none"
    return fields | _sigmoid_experts(c, fields["layers"]), _biases(c, attention_bias="q k v")


def gpt_oss(c: Reader) -> tuple[Fields, Biases]:
    fields = _common(c, head_dim=64) | _experts(c, "num_local_experts", "num_experts", "intermediate_size", norm_topk_prob=True)
    c.only("swiglu_alpha", 1.702)
    fields |= {"score": "softmax_of_chosen", "activation": "clamped_swiglu", "swiglu_limit": c.number("swiglu_limit", default=7.0)}
    alternating = [rope.LAYER_TYPES[(layer + 1) % 2] for layer in range(fields["layers"])]
    fields |= _windows(c, fields["layers"], c.integer("sliding_window", default=0), alternating)
    attention = ("q", "k", "v", "o") if c.flag("attention_bias", default=True) else ()
    return fields, (*attention, "router", *EXPERTS)


def mixtral(c: Reader) -> tuple[Fields, Biases]:
    fields = _common(c) | _experts(c, "num_local_experts", "num_experts", "intermediate_size", norm_topk_prob=True)
    return fields | _same_window(c, fields["layers"]), ()


def olmoe(c: Reader) -> tuple[Fields, Biases]:
    fields = _common(c) | _experts(c, "num_experts", "num_local_experts", "intermediate_size")
    return fields | {"qk_norm": "full", "clip_qkv": c.number("clip_qkv", default=0.0)}, _biases(c, attention_bias="q k v o")


def llama(c: Reader) -> tuple[Fields, Biases]:
    fields = _common(c, theta=1e4)  # the first ones do not say
    return fields | _dense(c, fields["layers"]), _biases(c, attention_bias="q k v o", mlp_bias=" ".join(MLP))


def mistral(c: Reader) -> tuple[Fields, Biases]:
    fields = _common(c, theta=1e4)
    return fields | _dense(c, fields["layers"]) | _same_window(c, fields["layers"], default=4096), ()


def qwen3(c: Reader) -> tuple[Fields, Biases]:
    fields = _common(c, head_dim=128) | {"qk_norm": "head"}
    return fields | _dense(c, fields["layers"]) | _switched_windows(c, fields["layers"]), _biases(c, attention_bias="q k v o")


def qwen2(c: Reader) -> tuple[Fields, Biases]:
    fields = _common(c)
    return fields | _dense(c, fields["layers"]) | _switched_windows(c, fields["layers"]), ("q", "k", "v")
