"""Reads the fields of an untrusted config, and collects all that is wrong with them."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

LARGEST = 2**31 - 1
# What changes nothing in a forward pass without dropout. Any other field that a family does not read must be empty.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention architectures attention_dropout
    attn_implementation auto_map aux_loss_alpha bos_token_id chat_template chunk_size_feed_forward compression_config
    cross_attention_hidden_size decoder_start_token_id dtype embd_pdrop eos_token_id ep_size experts_implementation finetuned
    finetuning_task hidden_dropout id2label initial_context_length initializer_range is_decoder is_encoder_decoder is_llama_config
    keys_to_ignore_at_inference label2id max_length model_name model_type num_mtp_layers num_nextn_predict_layers output_attentions
    output_hidden_states output_router_logits pad_token_id prefix pretraining_tp problem_type quantization_config resid_pdrop return_dict
    router_aux_loss_coef router_jitter_noise router_z_loss_coef sep_token_id seq_aux task_specific_params temperature
    tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed
    unsloth_version use_bfloat16 use_cache
    """.split()
)


def show(value: Any) -> str:
    """A value as an error message has it: short, however large it is."""
    try:
        return reprlib.repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return f"a {type(value).__name__} that is too large to print"


class Reader:
    """Fields by name. A wrong field adds a problem and gives a harmless value, so that one pass finds all problems.

    `relate` states what must hold between fields: it is heard only if every field by itself is right.
    """

    def __init__(self, config: Mapping[str, Any], where: str = ""):
        self.config, self.where = config, where
        self.problems: list[str] = []
        self._relations: list[str] = []
        self._read: set[str] = set()

    def get(self, *names: str) -> Any:
        """The value under any of these names, None where there is none. Two names must not hold two values."""
        self._read.update(names)
        found = [(name, self.config[name]) for name in names if self.config.get(name) is not None]
        for name, value in found[1:]:
            if type(value) is not type(found[0][1]) or value != found[0][1]:
                self.problem(found[0][0], found[0][1], f"the value {show(value)} of {self.where}{name}")
        return found[0][1] if found else None

    def problem(self, name: str, found: Any, need: str) -> None:
        self.problems.append(f"{self.where}{name}: found {show(found)}, need {need}")

    def relate(self, holds: bool, name: str, found: Any, need: str) -> None:
        if not holds:
            self._relations.append(f"{self.where}{name}: found {show(found)}, need {need}")

    def integer(self, *names: str, default: int | None = None, low: int = 1, high: int = LARGEST) -> int:
        """An integer; `default` (None: there must be one) where the field is absent or null."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.problem(names[0], value, f"an integer from {low} to {'2^31 - 1' if high == LARGEST else high}")
        return max(low, 1)

    def number(self, name: str, default: float | None = None, low: float = 0.0, inclusive: bool = False) -> float:
        """A finite number above `low`, or at least `low`."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        # The bound keeps an integer of any size from overflowing, and f32 from reading Inf.
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e38 and math.isfinite(value):
            if value > low or (inclusive and value == low):
                return float(value)
        self.problem(name, value, f"a finite number {'of at least' if inclusive else 'above'} {low:g}")
        return low + 1.0

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            self.problem(name, value, "true or false")
        return value is True

    def only(self, name: str, *allowed: Any) -> None:
        """The field is absent, null, or one of these values: nothing else is implemented."""
        value = self.get(name)
        same = lambda a: value == a and isinstance(value, bool) == isinstance(a, bool)  # True == 1
        if value is not None and not any(map(same, allowed)):
            self.problem(name, value, f"{' or '.join(map(repr, allowed))}: nothing else is implemented")

    def sequence(self, name: str) -> list | None:
        value = self.get(name)
        if value is None or isinstance(value, list):
            return value
        self.problem(name, value, "a list")
        return None

    def skip(self, *names: str) -> None:
        """These fields change nothing, given what has been read."""
        self._read.update(names)

    def finish(self) -> list[str]:
        """All problems. A field that nobody read may change the mathematics, so it must be empty."""
        for name in self.config:
            if name not in self._read and name not in HARMLESS and self.config[name]:
                self.problem(name, self.config[name], "this field absent or empty: what it asks for is not implemented for this family")
        return self.problems or self._relations
