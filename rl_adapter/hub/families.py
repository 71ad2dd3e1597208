"""Model families: which `config.json` describes a model that this package computes, and where its tensors lie.

A family is a description, not code: the names of its config fields and tensors, and the values of those fields that
would change the mathematics if they were any other. The mathematics is in model.py; a field that it does not implement
is an error, never ignored.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from rl_adapter.hub.files import read_json
from rl_adapter.types import Spec

LINEARS = ("q", "k", "v", "o", "router", "gate", "up", "down")  # fields of `types.Layer` that are weights; the others are norms
EXPERTS = ("gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Family:
    """How one architecture is written on disk. Tensor names have {l} for the layer and {e} for the expert."""

    architecture: str
    model_type: str
    fields: Mapping[str, str]  # field of `types.Spec` -> field of config.json
    neutral: Mapping[str, tuple]  # field of config.json -> the values that change nothing; an absent field is neutral
    base: Mapping[str, str]  # field of `types.Base` -> tensor
    layer: Mapping[str, str]  # field of `types.Layer` -> tensor
    fused: Mapping[str, tuple[str, int, int]]  # expert field -> (tensor [E, parts * out, in], which part, parts)


_LAYER = "model.layers.{l}."
QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    fields={
        "layers": "num_hidden_layers",
        "d_model": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "d_expert": "moe_intermediate_size",
        "vocab": "vocab_size",
        "norm_eps": "rms_norm_eps",
        "rope_theta": "rope_theta",
        "norm_topk_prob": "norm_topk_prob",
        "tie_embeddings": "tie_word_embeddings",
        "max_positions": "max_position_embeddings",
    },
    neutral={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
        # Not fields of this family, but of its relatives: a checkpoint that sets one is another model.
        "partial_rotary_factor": (1.0, None),
        "qkv_bias": (False, None),
        "mlp_bias": (False, None),
        "clip_qkv": (None,),
        "shared_expert_intermediate_size": (0, None),
        "n_shared_experts": (0, None),
        "first_k_dense_replace": (0, None),
        "n_group": (1, None),
        "routed_scaling_factor": (1.0, None),
        "scoring_func": ("softmax", None),
        "attn_logit_softcapping": (0, None),
        "final_logit_softcapping": (0, None),
        "swiglu_limit": (None,),
    },
    base={"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"},
    layer={
        "attn_norm": _LAYER + "input_layernorm.weight",
        "q": _LAYER + "self_attn.q_proj.weight",
        "k": _LAYER + "self_attn.k_proj.weight",
        "v": _LAYER + "self_attn.v_proj.weight",
        "o": _LAYER + "self_attn.o_proj.weight",
        "q_norm": _LAYER + "self_attn.q_norm.weight",
        "k_norm": _LAYER + "self_attn.k_norm.weight",
        "mlp_norm": _LAYER + "post_attention_layernorm.weight",
        "router": _LAYER + "mlp.gate.weight",
        "gate": _LAYER + "mlp.experts.{e}.gate_proj.weight",
        "up": _LAYER + "mlp.experts.{e}.up_proj.weight",
        "down": _LAYER + "mlp.experts.{e}.down_proj.weight",
    },
    fused={
        "gate": (_LAYER + "mlp.experts.gate_up_proj", 0, 2),
        "up": (_LAYER + "mlp.experts.gate_up_proj", 1, 2),
        "down": (_LAYER + "mlp.experts.down_proj", 0, 1),
    },
)
FAMILIES = {family.architecture: family for family in (QWEN3_MOE,)}
_ALIASES = {"num_experts": "num_local_experts"}  # transformers 5 writes the second name


def shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """The shape on disk of one slice of every field: [out, in] of a weight (one layer, one expert), [width] of a norm."""
    d, f = spec.d_model, spec.d_expert
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    weights = {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q), "router": (spec.experts, d)}
    weights |= {"gate": (f, d), "up": (f, d), "down": (d, f), "embed": (spec.vocab, d), "head": (spec.vocab, d)}
    norms = {"attn_norm": (d,), "q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,), "mlp_norm": (d,), "final_norm": (d,)}
    return weights | norms


def read_family(directory: str | os.PathLike) -> tuple[Family, dict[str, Any]]:
    """The family that `config.json` names, and the whole config."""
    path = pathlib.Path(directory) / "config.json"
    config = read_json(path)
    found = config.get("architectures")
    known = found[0] if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str) else None
    if known not in FAMILIES:
        raise ValueError(f"{path}: architectures: found {found!r}, need one of {', '.join(FAMILIES)}")
    family = FAMILIES[known]
    if config.get("model_type") != family.model_type:
        raise ValueError(f"{path}: model_type: found {config.get('model_type')!r}, need {family.model_type!r} for {known}")
    return family, config


def read_spec(directory: str | os.PathLike) -> Spec:
    """The model that `config.json` in `directory` describes.

    Raises:
        ValueError: all fields that are missing, malformed, or ask for something that is not implemented.
    """
    family, config = read_family(directory)
    config = dict(config)
    problems = _rope(config)
    for name, alias in _ALIASES.items():
        if alias in config:
            if config.setdefault(name, config[alias]) != config[alias]:
                problems.append(f"{name}: found {config[name]!r}, but {alias} is {config[alias]!r}")
    if config.get("head_dim") is None and all(_is(int, config.get(n)) for n in ("hidden_size", "num_attention_heads")):
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    config.setdefault("tie_word_embeddings", False)
    for name, values in family.neutral.items():
        if name in config and not any(type(config[name]) is type(v) and config[name] == v for v in _with_integers(values)):
            problems.append(f"{name}: found {config[name]!r}, need {' or '.join(map(repr, values))}: nothing else is implemented")
    types = {field.name: field.type for field in dataclasses.fields(Spec)}
    need = {int: "an integer from 1 to 2^31 - 1", float: "a finite number above 0", bool: "true or false"}
    values = {}
    for field, name in family.fields.items():
        if not _is(types[field], config.get(name)):
            problems.append(f"{name}: found {config.get(name)!r}, need {need[types[field]]}")
        else:
            values[field] = types[field](config[name])
    if not problems:
        spec = Spec(**values)
        problems = _consistency(spec)
    if problems:
        raise ValueError(f"{pathlib.Path(directory) / 'config.json'}:\n  " + "\n  ".join(problems))
    return spec


def _is(kind: type, value: Any) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and 1 <= value < 2**31
    return isinstance(value, int | float) and 0 < value < 1e38 and math.isfinite(value)


def _with_integers(values: tuple) -> tuple:
    """JSON writers disagree on 1 and 1.0; `True == 1` is why types are compared at all."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return (*values, *map(int, numbers), *map(float, numbers))


def _rope(config: dict[str, Any]) -> list[str]:
    """Moves `rope_theta` to the top of `config`, from where newer files keep it; what else RoPE is told to do is a problem."""
    problems = []
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            problems.append(f"{name}: found {rope!r}, need an object or null")
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        other = sorted(set(rope) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
        if kind != "default" or other or rope.get("partial_rotary_factor", 1) not in (1, None):
            problems.append(f"{name}: found {rope!r}, need rope_type 'default' with rope_theta: nothing else is implemented")
        if "rope_theta" in rope and config.setdefault("rope_theta", rope["rope_theta"]) != rope["rope_theta"]:
            problems.append(f"rope_theta: found {config['rope_theta']!r}, but {name}.rope_theta is {rope['rope_theta']!r}")
    return problems


def _consistency(spec: Spec) -> list[str]:
    problems = []
    if spec.heads % spec.kv_heads:
        problems.append(f"num_key_value_heads: found {spec.kv_heads}, need a divisor of num_attention_heads = {spec.heads}")
    if spec.head_dim % 2:
        problems.append(f"head_dim: found {spec.head_dim}, need an even number: RoPE turns pairs")
    if spec.experts_per_token > spec.experts:
        problems.append(f"num_experts_per_tok: found {spec.experts_per_token}, need at most num_experts = {spec.experts}")
    return problems
