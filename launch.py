"""Flags only; everything else is importable from `rl_adapter`.

    python launch.py                                        trains experiments/quickstart.py in runs/quickstart
    python launch.py --config=FILE[:arg] --config.adapter.rank=4 --workdir=runs/rank4
    python launch.py --mode=eval|sweep|consistency          on the same config and directory
    python launch.py --mode=audit                           whether a run's samples are those that it wrote
    python launch.py --mode=plan                            the memory that a run needs, told before anything is loaded
    python launch.py --mode=quality                         how far a low-precision base is from its original: table and plot
    python launch.py --mode=export --layout=fused           the run's adapter for peft; merged, or for serving engines
    python launch.py --adapter=DIR                          starts from an adapter in PEFT's format

A run that was stopped goes on where it was: repeat the command.
"""

import difflib
import pathlib
import re
import sys

from absl import flags
from ml_collections import config_flags

from rl_adapter import config as config_lib
from rl_adapter import config_check

HERE = pathlib.Path(__file__).resolve().parent
DEFAULT_CONFIG = "experiments/quickstart.py"
MODES = ("train", "eval", "sweep", "audit", "consistency", "export", "plan", "quality")
LAYOUTS = ("per-expert", "fused", "fused-0.18", "merged", "merged-requantized")


def config_file(argv: list[str]) -> tuple[str, list[str]]:
    """Splits --config=FILE[:arg] from argv; a relative FILE is sought from here, then beside launch.py."""
    value, rest, args = DEFAULT_CONFIG, [], iter(argv)
    for arg in args:
        name, equals, given = arg.partition("=")
        if name in ("--config", "-config"):
            value = given if equals else next(args, "")
        else:
            rest.append(arg)
    path, *argument = value.split(":", 1)
    if not pathlib.Path(path).is_file() and (HERE / path).is_file():
        path = str(HERE / path)
    return ":".join([path, *argument]), rest


def parse(argv: list[str]) -> tuple[flags.FlagValues, str]:
    """Parses the command line; anything wrong in it is a ValueError that names the flag.

    Returns:
      The flags, with the overridden config as `.config`, and the config's FILE[:arg].
    """
    file, rest = config_file(argv[1:])
    path, *argument = file.split(":", 1)
    config = config_lib.load_module(path).get_config(*argument)
    known = config_lib.flatten(config)
    for arg in rest:
        match = re.match(r"--?(?:no)?config\.([^=]*)", arg)
        if match and match[1] not in known:
            raise ValueError(f"--config.{match[1]}: no such field in {path}{config_lib.suggest(match[1], known)}")

    argv = [argv[0], *rest]
    values = flags.FlagValues()
    # `sys_argv` and a private FlagValues keep parsing a function of argv alone, callable from tests.
    config_flags.DEFINE_config_dict("config", config, "the experiment, FILE[:arg]", flag_values=values, sys_argv=argv)
    flags.DEFINE_string("workdir", f"runs/{pathlib.Path(path).stem}", "directory of the run", flag_values=values)
    flags.DEFINE_enum("mode", "train", MODES, "what to do", flag_values=values)
    flags.DEFINE_string("adapter", "", "PEFT directory of the adapter to start from (--config.adapter.init)", flag_values=values)
    flags.DEFINE_enum("layout", "per-expert", LAYOUTS, "of an export: keys for serving engines, for peft, or merged", flag_values=values)
    flags.DEFINE_string("out", "", "directory of an export; '': WORKDIR/export-LAYOUT", flag_values=values)
    flags.DEFINE_integer("devices", 0, "number of devices, virtual on CPU; 0: the backend's own", flag_values=values)
    flags.DEFINE_boolean("override_identity", False, "resume despite another base, config or package version", flag_values=values)
    flags.DEFINE_boolean("debug", False, "show the traceback of an error", flag_values=values)
    flags.DEFINE_boolean("help", False, "show this", flag_values=values)
    try:
        extra = values(argv)[1:]
    except flags.UnrecognizedFlagError as e:
        close = difflib.get_close_matches(e.flagname, list(values), 3)
        raise ValueError(f"--{e.flagname}: no such flag" + (f" (close: --{', --'.join(close)})" if close else "")) from None
    except (flags.Error, TypeError, KeyError, AttributeError) as e:
        # absl says "flag --x=y: <why>"; add the type that a config field needs.
        field = re.match(r"flag --config\.([\w.]+)=", str(e))
        need = f"; need {type(known[field[1]]).__name__}" if field and field[1] in known else ""
        raise ValueError(f"{e}{need}") from e
    if extra:
        raise ValueError(f"arguments: found {' '.join(extra)!r}, need flags only (--name=value)")
    if values.adapter:
        values.config.adapter.init = values.adapter
    return values, file


def main(argv: list[str]) -> None:
    """Dispatches to a function of the package."""
    values, file = parse(argv)
    if values.help:
        print(__doc__, values.get_help(), sep="\n")
        return
    config, workdir = values.config, values.workdir
    config_check.validate(config)

    from rl_adapter import runtime  # imports JAX, which a wrong command line need not wait for

    if values.mode == "plan":
        from rl_adapter import plan

        plan.run(config, values.devices)  # of a machine that need not be this one
        return
    runtime.setup(values.devices)
    from rl_adapter import programs

    programs.keep(runtime.cache_dir() / "programs")
    if values.mode == "train":
        from rl_adapter import offline, train

        run = train.run if config.objective == "rl" else offline.run
        run(config, workdir, override_identity=values.override_identity)
    elif values.mode == "audit":
        from rl_adapter import audit

        audit.run(workdir)
    elif values.mode == "eval":
        from rl_adapter import evaluate

        evaluate.run(config, workdir, override_identity=values.override_identity)
    elif values.mode == "export":
        from rl_adapter import export

        export.run(config, workdir, values.layout, values.out, override_identity=values.override_identity)
    elif values.mode == "sweep":
        from rl_adapter import sweep

        sweep.run(config, sweep.load_hyper(file), workdir)
    elif values.mode == "quality":
        from rl_adapter import quality

        quality.run(config, workdir)
    else:
        from rl_adapter import consistency

        consistency.run(config, workdir)


if __name__ == "__main__":
    try:
        main(sys.argv)
    except (ValueError, OSError, FloatingPointError) as error:
        if "--debug" in sys.argv:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("stopped; repeat the command to go on")
