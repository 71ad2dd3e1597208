"""Imports point one way, and each outside library has one door."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "rl_adapter"

# Lowest first. A module may import from lower layers only; where said so, from its own layer too (without a cycle).
LAYERS = [
    ("types", "files", "config", "config_check", "runtime", "sandbox", "sandbox_stage", "statistics"),
    ("environments", "manifest", "mesh", "numerics", "packing"),
    ("quant", "microbatch", "programs"),
    ("lora",),
    ("attention", "moe"),
    ("cache",),
    ("model",),
    ("hub", "loss", "sampling"),  # the loss is a part of the update, as sampling, engine and scheduler are of the rollout
    ("engine",),
    ("scheduler", "scoring"),
    ("scalar",),
    ("data", "rollout", "episodes", "rewards", "advantage", "update", "checkpoint", "samples", "monitor"),  # the stages
    ("session", "plan"),
    ("play",),
    ("train", "offline", "evaluate", "experience", "learn", "runs", "audit", "consistency", "export", "sweep", "quality", "quality_show"),
]
WITHIN = {0, 14}  # a sandbox has its stage; orchestration: a sweep calls train, train calls evaluate
RUN_ELSEWHERE = {"math_verify": {"rewards"}, "jsonschema": {"rewards"}}  # in a killable process
DOORS = {
    **RUN_ELSEWHERE,
    "aqt": {"quant"},
    "orbax": {"checkpoint", "hub"},  # states, and prepared copies of bases
    "safetensors": {"hub"},
    "pydantic": {"environments"},
    "pyarrow": {"config_check", "data", "train", "samples", "environments"},  # Parquet
    "bm25s": {"environments"},
}


def imports(path: pathlib.Path) -> set[str]:
    """Dotted names of all that a file imports, wherever in it: `from a import b` gives a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; say rl_adapter.x"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules() -> dict[str, set[str]]:
    """First-level module of the package (a subpackage counts as one) -> all it imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name != "__init__":
            found.setdefault(name, set()).update(imports(path))
    return found


MODULES = modules()
LAYER = {name: i for i, names in enumerate(LAYERS) for name in names}
EDGES = {name: {i.split(".")[1] for i in found if i.startswith("rl_adapter.")} & MODULES.keys() - {name} for name, found in MODULES.items()}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name):
    assert name in LAYER, f"rl_adapter/{name} has no layer: give it one in LAYERS"
    for target in EDGES[name]:
        assert target in LAYER, f"rl_adapter/{target} has no layer: give it one in LAYERS"
        same = LAYER[target] == LAYER[name] and LAYER[name] in WITHIN
        assert same or LAYER[target] < LAYER[name], f"{name} imports {target}, which is not below it"


def test_no_cycles():
    left = {name: set(targets) for name, targets in EDGES.items()}
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"import cycle among {sorted(left)}"


@pytest.mark.parametrize("library", sorted(DOORS))
def test_each_library_has_one_door(library):
    users = {name for name, found in MODULES.items() if any(i.split(".")[0] == library for i in found)}
    assert users <= DOORS[library]


def test_nothing_below_imports_launch_experiments_or_tests():
    for name, found in MODULES.items():
        assert not {i.split(".")[0] for i in found} & {"launch", "experiments", "tests"}, name
