"""What is wrong on the command line is one line that names it, and exit code 2: nothing is compiled and nothing written."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

import launch
from rl_adapter import runtime

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(
    "args,message",
    [
        (["--config.lerning_rate=1"], r"^--config\.lerning_rate: no such field.*close: .*optimizer\.learning_rate"),
        (["--config.adapter.rnk=1"], r"^--config\.adapter\.rnk: no such field.*close: adapter\.rank"),
        (["--config.adapter=1"], r"^--config\.adapter: no such field.*adapter\.rank"),
        (["--config.steps=ten"], r"--config\.steps=ten.*need int"),
        (["--config.loss.kl=x"], r"--config\.loss\.kl=x.*need float"),
        (["--config.remat=maybe"], r"--config\.remat=maybe"),
        (["--config=missing.py"], r"'missing\.py', which is no file"),
        (["--config"], r"found '', which is no file"),
        (["--wrokdir=x"], r"^--wrokdir: no such flag \(close: --workdir\)"),
        (["--mode=trian"], r"--mode=trian.*train\|eval\|sweep\|audit\|consistency"),
        (["--devices=two"], r"--devices=two"),
        (["runs/x"], r"found 'runs/x', need flags only"),
    ],
)
def test_parse_refuses(args, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=message):
        launch.parse(["launch.py", *args])


def test_parse_reads_overrides_in_any_order_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ["--config.steps=3", "--config.adapter.rank=4", "--config=experiments/quickstart_sweep.py", "--noconfig.remat", "--devices=2"]
    values, file = launch.parse(["launch.py", *args, "--config.data.train=a", "--config.data.train=b"])
    assert (values.config.steps, values.config.adapter.experts.rank, values.config.remat) == (3, 4, False)
    assert values.config.data.train == ("a", "b")
    assert (values.workdir, values.devices, values.mode) == ("runs/quickstart_sweep", 2, "train")
    assert file == str(ROOT / "experiments/quickstart_sweep.py")


def test_parse_passes_the_argument_of_a_config(tmp_path):
    path = tmp_path / "mine.py"
    text = "from rl_adapter import config\ndef get_config(n):\n c = config.default()\n c.steps = int(n)\n return c\n"
    path.write_text(text)
    values, file = launch.parse(["launch.py", f"--config={path}:5", "--config.seed=2"])
    assert file == f"{path}:5"
    assert (values.config.steps, values.config.seed, values.workdir) == (5, 2, "runs/mine")


@pytest.mark.parametrize(
    "args,message",
    [
        (["--config.stepz=3"], "--config.stepz: no such field"),
        (["--config.rollout.prompts=-8"], "rollout.prompts: found -8, need at least 1"),
    ],
)
def test_entry_point_says_one_line_and_writes_nothing(args, message, tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "launch.py"), *args], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


SETUP = """
import sys
from rl_adapter import runtime
runtime.setup(int(sys.argv[1]))
import jax, jax.numpy as jnp
f = jax.jit(lambda x: x + 1)
x = jnp.zeros(jax.device_count())
made = runtime.compilations()
f(x), f(x)
print(jax.device_count(), runtime.compilations() - made, len(list(runtime.cache_dir().iterdir())) > 0)
"""


def test_setup_fixes_devices_and_counts_and_caches_compilations(tmp_path):
    env = os.environ | {"RL_ADAPTER_CACHE": str(tmp_path)}  # XLA_FLAGS there asks for 8: --devices goes before it
    done = subprocess.run([sys.executable, "-c", SETUP, "3"], capture_output=True, text=True, cwd=ROOT, env=env, timeout=60)
    assert done.stdout.split() == ["3", "1", "True"], done.stderr
    assert jax.device_count() == 8  # starts the backend, after which it is too late to ask for another number
    with pytest.raises(ValueError, match="--devices: found 8 cpu devices, need 5"):
        runtime.setup(5)
    with pytest.raises(ValueError, match="--devices: found -1"):
        runtime.setup(-1)
