"""Programs compiled in a third of the time: scalar and hardly fused machine code of the same arithmetic.

No bit of exact numerics may depend on that either.
"""

import contextlib
import functools

import jax
import pytest

from rl_adapter import engine, scalar, scoring, update

# One constant for all tests, so that it can go when these options do.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False, "xla_llvm_disable_expensive_passes": True}
PROGRAMS = {  # static and donated arguments
    (engine, "prefill"): (("model", "sampling", "budget"), ("pool",)),
    (engine, "decode"): (("model", "sampling", "steps"), ("pool",)),
    (update, "_update"): (("model", "tx", "objective", "size"), ("state",)),
    (scoring, "_score_all"): (("model", "temperature", "size"), ()),
    (scalar, "_values_all"): (("model", "size"), ()),
}


@functools.cache  # so that what is compiled is shared
def _compiled(module, name):
    static, donated = PROGRAMS[module, name]
    function = getattr(module, name).__wrapped__
    return jax.jit(function, static_argnames=static, donate_argnames=donated, compiler_options=QUICK)


@contextlib.contextmanager
def quickly(modules=(engine, scoring, scalar, update)):
    """The programs of rollout, scoring and update are compiled so while this lasts."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in PROGRAMS:
            if module in modules:
                patch.setattr(module, name, _compiled(module, name))
        yield
