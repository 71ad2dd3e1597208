"""Pairs and examples: read, checked and encoded with their completions."""

import pytest
from data_files import config, write, write_parquet

from rl_adapter.config import SHIPPED_BASE as ASSETS
from rl_adapter.data import offline, records
from rl_adapter.hub.tokenizer import load_tokenizer
from rl_adapter.types import Example, Pair


def test_pairs_and_examples(tmp_path):
    tokenizer = load_tokenizer(ASSETS, 145)
    lines = [
        {"prompt": "1+1? ", "chosen": "2", "rejected": "3"},
        {"prompt": "1+1? ", "chosen": "2", "rejected": "4"},
        {"messages": [{"role": "user", "content": "2? "}], "chosen": "1+1=2", "rejected": "1", "level": 2},
    ]
    for path in (write(tmp_path / "p.jsonl", *lines), write_parquet(tmp_path / "p.parquet", lines)):
        split = offline.load_pairs(
            config(train=(path,), eval=(write(tmp_path / "e.jsonl", {"prompt": "9", "chosen": "1", "rejected": "2"}),)), "train"
        )
        a, b, c = offline.pairs(split)
        assert a == Pair(records.problem("1+1? ", "", "file"), "2", "3") and b.rejected == "4" and c.problem.metadata == {"level": 2}
    plain = dict(train=(write(tmp_path / "x.jsonl", *({"prompt": f"{i}? ", "completion": f"{i}"} for i in (7, 1234))),))
    data = config(**plain, eval=(write(tmp_path / "y.jsonl", {"prompt": "5", "completion": "6"}),), too_long="drop")
    split = offline.load_examples(data, "train")
    assert offline.examples(split)[0] == Example(records.problem("7? ", "", "file"), "7")
    left, encoded = offline.encode(tokenizer, data, split, 3, stop=0)
    assert [item.completions for item in left.items] == [("7",)] and left.report.dropped[0].count == 1
    ((completion,),) = encoded.completions
    assert completion.tolist() == [*tokenizer.encode("7", special=False), 0] and len(encoded.prompts) == 1
    with pytest.raises(ValueError, match="rollout.max_new_tokens: found 3, need 5 for 1 of 2 records"):
        offline.encode(tokenizer, config(**plain), split, 3, stop=0)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"chosen": "a"}, "x.jsonl:1: rejected: found only"),
        ({"chosen": "a", "rejected": 3}, "x.jsonl:1: rejected: found 3, need a text"),
        ({"chosen": "a", "rejected": " "}, "data.empty: found 1 of 1 records with a blank text .*x.jsonl:1: ' ' is blank"),
        ({"chosen": "a", "rejected": "a"}, "data.empty: .*'a' is both chosen and rejected"),
    ],
)
def test_bad_pairs_are_named(tmp_path, row, message):
    path = write(tmp_path / "x.jsonl", {"prompt": "p"} | row)
    with pytest.raises(ValueError, match=message):
        offline.load_pairs(config(train=(path,), eval=(path,)), "train")


def test_generated_problems_have_no_pairs():
    with pytest.raises(ValueError, match="data.train: found 'base_conversion', need files or functions, whose rows give chosen, rejected"):
        offline.load_pairs(config(), "train")
