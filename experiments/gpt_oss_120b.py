"""GRPO on gpt-oss-120b, its experts in MXFP4 as released.

    python launch.py --config=experiments/gpt_oss_120b.py:/path/to/checkpoint --workdir=runs/gpt_oss_120b

Hardware: 8 x H200. Memory: 70.2 GB of the 141 GB of each, by `python launch.py --mode=plan --config=experiments/gpt_oss_120b.py`.
Not run on that hardware: the figure is arithmetic. Without a path, planning reads experiments/models, facts of the release.
"""

import pathlib

from ml_collections import ConfigDict

from experiments import gpt_oss_20b


def get_config(model: str = "") -> ConfigDict:
    """As for the small one. With 128 experts, four times as many, a rank on them counts four times as much: hence the shared A."""
    return gpt_oss_20b.get_config(model or str(pathlib.Path(__file__).parent / "models" / "gpt_oss_120b"))
