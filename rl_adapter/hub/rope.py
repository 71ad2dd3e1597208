"""The frequencies of rotary embeddings, and what `rope_scaling` or `rope_parameters` of a config does to them.

Values follow transformers: powers of an f32 exponent, rounded to f32, then f32 arithmetic. The power itself is taken in f64, so that
it does not depend on whose f32 `pow` is installed.
"""

import math

import numpy as np

from rl_adapter.hub.reader import Reader, show
from rl_adapter.types import Rope

f32 = np.float32
KINDS = ("default", "linear", "llama3", "yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")
WIDEST = 2**16  # of a head: an untrusted config must not ask for a table without end


def plain(theta: float, width: int, interleaved: bool = False) -> Rope:
    """The rotary embedding of Su et al. over `width` features."""
    return Rope(tuple(map(float, f32(1) / _powers(theta, width))), interleaved=interleaved)


def read(
    config: Reader, width: int, theta: float | None = None, partial: float | None = None, interleaved: bool = False
) -> tuple[Rope, float]:
    """What the config says of RoPE.

    Args:
        config: problems are added to it.
        width: features of a head, of which the first `partial_rotary_factor` turn.
        theta: the base where the config names none; None: it must.
        partial: the factor where the config names none; None: the family turns all features.
        interleaved: whether pairs are neighbours.

    Returns:
        The `Rope`, and DeepSeek's m (`mscale_all_dim` of yarn), whose square multiplies the scale of attention; else 1.
    """
    inner = _section(config)
    if inner is None:
        return Rope(()), 1.0
    kind = inner.get("rope_type", "type") or "default"
    if kind not in KINDS:
        inner.problem("rope_type", kind, ", ".join(KINDS[:-1]) + f" or {KINDS[-1]}: nothing else is implemented")
        config.problems += inner.problems
        return Rope(()), 1.0
    base = inner.number("rope_theta", default=theta, low=1.0)
    share = 1.0
    if partial is None:
        inner.only("partial_rotary_factor", 1.0)
    else:
        share = inner.number("partial_rotary_factor", default=partial)
        inner.relate(share <= 1, "partial_rotary_factor", share, "at most 1")
    turned = int(width * min(share, 1.0))
    config.relate(turned >= 2 and turned % 2 == 0, "head_dim", width, f"an even number of rotated features, not {turned}: RoPE turns pairs")
    if kind in ("llama3", "yarn"):
        positions = config.integer("max_position_embeddings")
        original = inner.integer("original_max_position_embeddings", default=positions)
    inner.skip("original_max_position_embeddings", "finetuned")
    factor = 1.0 if kind == "default" else inner.number("factor", low=1.0, inclusive=True)
    attention, mscale = 1.0, 1.0
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        inner.relate(high > low, "high_freq_factor", high, f"more than low_freq_factor, {low:g}")
    if kind == "yarn":
        fast, slow = (inner.number(name, default=d, inclusive=True) or d for name, d in (("beta_fast", 32.0), ("beta_slow", 1.0)))
        truncate = inner.flag("truncate", default=True)
        m, all_dim = (inner.number(name, default=0.0, inclusive=True) for name in ("mscale", "mscale_all_dim"))
        attention = inner.number("attention_factor", default=0.0) or (
            _mscale(factor, m) / _mscale(factor, all_dim) if m and all_dim else _mscale(factor, 1.0)
        )
        mscale = _mscale(factor, all_dim)
    problems = inner.finish()
    config.problems += problems
    if problems or turned < 2 or turned % 2:
        return Rope(()), 1.0
    powers = _powers(base, turned)
    frequencies = f32(1) / powers
    with np.errstate(over="ignore"):  # an absurd factor stops the rotation: 1 / inf
        if kind == "linear":
            frequencies = frequencies / f32(factor)
        elif kind == "llama3":
            frequencies = _llama3(frequencies, factor, low, high, original)
        elif kind == "yarn":
            frequencies = _yarn(powers, base, factor, fast, slow, original, truncate)
    return Rope(tuple(map(float, frequencies)), float(attention), interleaved), mscale


def _section(config: Reader) -> Reader | None:
    """The object that describes RoPE, with what older files keep at the top beside it."""
    sections, before = {}, len(config.problems)
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name)
        if isinstance(value, dict) and value and all(key in LAYER_TYPES for key in value):
            if any(each != next(iter(value.values())) for each in value.values()):
                config.problem(name, value, "the same RoPE for all kinds of layers")
            value = next(iter(value.values()))
        if isinstance(value, dict) and all(v is None or isinstance(v, str | int | float) for v in value.values()):
            sections[name] = {key: v for key, v in value.items() if v is not None}
        elif value is not None:
            config.problem(name, value, "an object of numbers and names, or null")
    where = next(iter(sections), "")
    section = dict(sections.get(where, {}))
    if len(sections) == 2 and sections["rope_scaling"] != sections["rope_parameters"]:
        config.problem("rope_scaling", sections["rope_scaling"], f"what rope_parameters holds, {show(sections['rope_parameters'])}")
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        value = config.get(name)
        if value is None or (name.startswith("original") and not where):
            continue
        if section.setdefault(name, value) != value:
            config.problem(name, value, f"the value {show(section[name])} of {where}.{name}")
    return None if len(config.problems) > before else Reader(section, f"{where}." if where else "")


def _powers(theta: float, width: int) -> np.ndarray:
    exponent = np.arange(0, width, 2).astype(f32) / f32(width)
    return (np.float64(theta) ** exponent.astype(np.float64)).astype(f32)


def _mscale(factor: float, m: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0


def _llama3(frequencies: np.ndarray, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """Waves longer than the original context / low slow down by `factor`, those shorter than original / high do not, smoothly between."""
    waves = f32(2 * math.pi) / frequencies
    smooth = (f32(original) / waves - f32(low)) / f32(high - low)
    between = (1 - smooth) * frequencies / f32(factor) + smooth * frequencies
    slow, keep = waves > f32(original / low), waves < f32(original / high)
    return np.where(slow, frequencies / f32(factor), np.where(keep, frequencies, between))


def _yarn(powers: np.ndarray, theta: float, factor: float, fast: float, slow: float, original: int, truncate: bool) -> np.ndarray:
    """YaRN (arXiv:2309.00071): features that turn more than `fast` times in the original context stay, fewer than `slow` slow down."""
    width = 2 * len(powers)
    feature = lambda turns: width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
    low, high = feature(fast), feature(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(len(powers), dtype=f32) - f32(low)) / f32(high - low), f32(0), f32(1))
    keep = 1 - ramp
    return f32(1) / (f32(factor) * powers) * (1 - keep) + f32(1) / powers * keep
