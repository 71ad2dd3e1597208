"""Model families: which `config.json` describes a model that this package computes, and where its tensors lie.

A family is a description, not code: how its config reads as a `types.Spec`, and the names of its modules. The mathematics is in
model.py; whatever a config asks for that is not implemented there is an error, never ignored.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from rl_adapter.hub import configs
from rl_adapter.hub.codecs.codec import Source
from rl_adapter.hub.configs import EXPERTS, Biases, Fields
from rl_adapter.hub.files import read_json
from rl_adapter.hub.reader import Reader, show
from rl_adapter.types import Spec

TOP = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


@dataclasses.dataclass(frozen=True)
class Family:
    """How one architecture is written on disk. Module paths are below `model.layers.{l}.`, with {e} for the expert."""

    architecture: str
    model_types: tuple[str, ...]
    read: Callable[[Reader], tuple[Fields, Biases]]
    modules: Mapping[str, str]  # field of `types.Layer` -> module
    sparse: Mapping[str, str] = dataclasses.field(default_factory=dict)  # and in layers with experts
    renamed: tuple[str, str] = ("", "")  # of module paths: as released -> as transformers 5 has them in memory
    interleaved: bool = False  # fused experts are [E, in, out], gate and up taking turns; else [E, out, in], gate before up
    mtp: bool = False  # layers after the last predict tokens further ahead: not part of the model


@dataclasses.dataclass(frozen=True)
class Description:
    """What a config says: the model, and what the files hold."""

    family: Family
    spec: Spec
    biases: Biases  # fields that have a bias
    prefix: str  # of all tensor names
    mtp_layers: int


@dataclasses.dataclass(frozen=True)
class Parameter:
    """The parameter in which transformers 5 keeps a matrix of all experts: [E, out, in], or transposed [E, in, out]."""

    name: str
    transposed: bool
    outputs: slice  # the field's part of the output axis


# --- names -------------------------------------------------------------------------------------------------------------------------


def _below(module: str, **names: str) -> dict[str, str]:
    return {field: f"{module}.{name}" for field, name in names.items()}


_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_PROJECTIONS = _below("self_attn", q="q_proj", k="k_proj", v="v_proj", o="o_proj")
_QK_NORMS = _below("self_attn", q_norm="q_norm", k_norm="k_norm")
_LATENT = {"q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa"}
_MLA = _below("self_attn", q="q_proj", **_LATENT, kv_a_norm="kv_a_layernorm", kv_b="kv_b_proj", o="o_proj")
_DENSE = _below("mlp", mlp_gate="gate_proj", mlp_up="up_proj", mlp_down="down_proj")
_LLAMA = _NORMS | _PROJECTIONS | _DENSE
_SPARSE = {"router": "mlp.gate"} | _below("mlp.experts.{e}", gate="gate_proj", up="up_proj", down="down_proj")
_SHARED = _below("mlp.shared_experts", mlp_gate="gate_proj", mlp_up="up_proj", mlp_down="down_proj")
_SIGMOID = _SPARSE | _SHARED | {"score_bias": "mlp.gate.e_score_correction_bias"}
_MIXTRAL = {"router": "block_sparse_moe.gate"} | _below("block_sparse_moe.experts.{e}", gate="w1", up="w3", down="w2")
_WHOLE = ("sinks", "score_bias")  # parameters by themselves: no `.weight` after the name

QWEN3_MOE = Family("Qwen3MoeForCausalLM", ("qwen3_moe",), configs.qwen3_moe, _LLAMA | _QK_NORMS, _SPARSE)
DEEPSEEK = Family("DeepseekV3ForCausalLM", ("deepseek_v3", "kimi_k2"), configs.deepseek, _NORMS | _MLA | _DENSE, _SIGMOID, mtp=True)
_SINKS = {"sinks": "self_attn.sinks"}
GPT_OSS = Family(
    "GptOssForCausalLM", ("gpt_oss",), configs.gpt_oss, _NORMS | _PROJECTIONS | _SINKS, {"router": "mlp.router"},
    interleaved=True,
)  # fmt: skip
GLM4_MOE = Family("Glm4MoeForCausalLM", ("glm4_moe",), configs.glm4_moe, _LLAMA | _QK_NORMS, _SIGMOID, mtp=True)
MIXTRAL = Family(
    "MixtralForCausalLM", ("mixtral",), configs.mixtral, _NORMS | _PROJECTIONS, _MIXTRAL, renamed=("block_sparse_moe", "mlp")
)  # fmt: skip
OLMOE = Family("OlmoeForCausalLM", ("olmoe",), configs.olmoe, _NORMS | _PROJECTIONS | _QK_NORMS, _SPARSE)
LLAMA = Family("LlamaForCausalLM", ("llama",), configs.llama, _LLAMA)
MISTRAL = Family("MistralForCausalLM", ("mistral",), configs.mistral, _LLAMA)
QWEN3 = Family("Qwen3ForCausalLM", ("qwen3",), configs.qwen3, _LLAMA | _QK_NORMS)
QWEN2 = Family("Qwen2ForCausalLM", ("qwen2",), configs.qwen2, _LLAMA)
FAMILIES = {f.architecture: f for f in (QWEN3_MOE, DEEPSEEK, GPT_OSS, GLM4_MOE, MIXTRAL, OLMOE, LLAMA, MISTRAL, QWEN3, QWEN2)}


# --- reading a config --------------------------------------------------------------------------------------------------------------


def describe(config: Mapping[str, Any], where: str = "config.json") -> Description:
    """The model that a config describes.

    Args:
        config: as parsed from JSON.
        where: named in errors.

    Raises:
        ValueError: all fields that are missing, malformed, or ask for something that is not implemented.
    """
    prefix = ""
    if config.get("model_type") == "kimi_k25":  # text and images: the text model is the one that is trained
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise ValueError(f"{where}: text_config: found {show(text)}, need an object")
        prefix, config = "language_model.", {"architectures": [DEEPSEEK.architecture], **text}
    found = config.get("architectures")
    known = found[0] if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str) else None
    if known not in FAMILIES:
        raise ValueError(f"{where}: architectures: found {show(found)}, need one of {', '.join(FAMILIES)}")
    family = FAMILIES[known]
    if config.get("model_type") not in family.model_types:
        need = " or ".join(map(repr, family.model_types))
        raise ValueError(f"{where}: model_type: found {show(config.get('model_type'))}, need {need} for {known}")
    reader = Reader(config)
    fields, biases = family.read(reader)
    mtp = reader.integer("num_nextn_predict_layers", "num_mtp_layers", default=1, low=0) if family.mtp else 0
    if problems := reader.finish():
        raise ValueError(f"{where}:\n  " + "\n  ".join(problems))
    return Description(family, Spec(**fields), biases, prefix, mtp)


def read_family(directory: str | os.PathLike) -> tuple[Description, dict[str, Any]]:
    """What `config.json` in `directory` describes, and the whole config.

    Where the text model is only a part, that is its config, with both places of `quantization_config` for `codecs.read_quantization`.
    """
    path = pathlib.Path(directory) / "config.json"
    config = read_json(path)
    described = describe(config, str(path))
    if described.prefix:
        text, top = config["text_config"], config.get("quantization_config")
        config = text | {"text_config": text} | ({} if top is None else {"quantization_config": top})
    return described, config


def spec_of(config: Mapping[str, Any]) -> Spec:
    return describe(config).spec


def read_spec(directory: str | os.PathLike) -> Spec:
    return read_family(directory)[0].spec


# --- tensors -----------------------------------------------------------------------------------------------------------------------


def top(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Shapes on disk of the fields of `types.Base` beside its layers."""
    return {"embed": (spec.vocab, spec.d_model), "final_norm": (spec.d_model,), "head": (spec.vocab, spec.d_model)}


def fields(described: Description, sparse: bool) -> dict[str, tuple[int, ...]]:
    """The fields of a layer with or without experts, and the shape on disk of one slice of each: one layer, one expert.

    Matrices are [out, in], all else [width]. "bias.q" is the bias of q. "kv_b" [H * (nope + v), kv_rank] stands for k_up and v_up: a
    head's first `nope` rows are its k_up, the others its v_up.
    """
    s, d = described.spec, described.spec.d_model
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (d,), "mlp_norm": (d,)}
    if s.mla:
        query, value = s.heads * (s.mla.nope + s.mla.rope), s.heads * s.mla.v
        if s.mla.q_rank:
            shapes |= {"q_a": (s.mla.q_rank, d), "q_a_norm": (s.mla.q_rank,), "q_b": (query, s.mla.q_rank)}
        else:
            shapes |= {"q": (query, d)}
        shapes |= {"kv_a": (s.mla.kv_rank + s.mla.rope, d), "kv_a_norm": (s.mla.kv_rank,)}
        shapes |= {"kv_b": (s.heads * s.mla.nope + value, s.mla.kv_rank), "o": (d, value)}
    else:
        query, key = s.heads * s.head_dim, s.kv_heads * s.head_dim
        shapes |= {"q": (query, d), "k": (key, d), "v": (key, d), "o": (d, query)}
        if s.qk_norm == "head":
            shapes |= {"q_norm": (s.head_dim,), "k_norm": (s.head_dim,)}
        elif s.qk_norm == "full":
            shapes |= {"q_norm": (query,), "k_norm": (key,)}
    if "sinks" in described.family.modules:
        shapes["sinks"] = (s.heads,)
    if width := s.d_shared if sparse else s.d_mlp:
        shapes |= {"mlp_gate": (width, d), "mlp_up": (width, d), "mlp_down": (d, width)}
    if sparse:
        shapes |= {"router": (s.experts, d), "gate": (s.d_expert, d), "up": (s.d_expert, d), "down": (d, s.d_expert)}
        if s.score == "sigmoid":
            shapes["score_bias"] = (s.experts,)
    return shapes | {f"bias.{name}": shapes[name][:1] for name in described.biases if name in shapes}


def per_expert(field: str) -> bool:
    """Whether a field has one slice an expert."""
    return field.removeprefix("bias.") in EXPERTS


def module(described: Description, field: str, layer: int = 0, expert: int | None = None) -> str:
    """The path of the module of a field, as released checkpoints name it."""
    if field in TOP:
        return described.prefix + TOP[field]
    family = described.family
    modules = family.modules if layer in described.spec.dense else {**family.modules, **family.sparse}
    if field not in modules:
        raise ValueError(f"{field}: found no module of this name in layer {layer} of {family.architecture}")
    return f"{described.prefix}model.layers.{layer}." + modules[field].format(e=expert)


def parameter(described: Description, field: str, layer: int) -> Parameter:
    """Where transformers 5 has an expert field in memory, and some files on disk."""
    fused, width = described.family.interleaved, described.spec.d_expert
    name = f"{described.prefix}model.layers.{layer}.mlp.experts."
    if field == "down":
        return Parameter(name + "down_proj", fused, slice(None))
    part = ("gate", "up").index(field)
    return Parameter(name + "gate_up_proj", fused, slice(part, None, 2) if fused else slice(part * width, (part + 1) * width))


def source(described: Description, field: str, layer: int = 0, expert: int | None = None, *, has: Callable[[str], bool]) -> Source:
    """Where one slice of a field lies.

    Args:
        described: the model.
        field: a key of `fields` or of `top`.
        layer: index among all layers.
        expert: index, of fields that are `per_expert`.
        has: whether the files have a tensor of this name. It tells fused experts from single ones.

    Returns:
        The name, index and shape of a float tensor; a codec puts its own endings to the name, and turns what it keeps another way.
    """
    if field in TOP:
        return Source(module(described, "embed" if field == "head" and described.spec.tie_embeddings else field) + ".weight")
    biased, field = field.startswith("bias."), field.removeprefix("bias.")
    spec, family = described.spec, described.family
    fused = family.interleaved or (layer not in spec.dense and has(parameter(described, "gate", layer).name))
    if field in EXPERTS and fused:
        at = parameter(described, field, layer)
        out, width = (spec.d_model, spec.d_expert) if field == "down" else (2 * spec.d_expert, spec.d_model)
        part = () if at.outputs == slice(None) else (at.outputs,)
        if biased:
            return Source(at.name + "_bias", (expert, *part), (spec.experts, out))
        if at.transposed:
            return Source(at.name, (expert, slice(None), *part) if part else (expert,), (spec.experts, width, out), transposed=True)
        return Source(at.name, (expert, *part), (spec.experts, out, width))
    path = module(described, field, layer, expert)
    if fused and family.renamed[0]:
        path = path.replace(*family.renamed)
    return Source(path if field in _WHOLE else path + (".bias" if biased else ".weight"))


def ignored(described: Description, name: str) -> bool:
    """Whether a tensor is no part of the model: other towers, layers that predict further ahead, tables that follow from the config."""
    if not name.startswith(described.prefix):
        return name.startswith(("vision_tower.", "mm_projector.", "multi_modal_projector."))
    name = name.removeprefix(described.prefix)
    if name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and described.spec.tie_embeddings):
        return True
    first, *rest = name.removeprefix("model.layers.").split(".", 1)
    if not (rest and name.startswith("model.layers.") and first.isascii() and first.isdigit() and len(first) < 6):
        return False
    return 0 <= int(first) - described.spec.layers < described.mtp_layers
