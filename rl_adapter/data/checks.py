"""What is wrong with a data set, and what is left of it: every fault is counted and shown, and refused or dropped as the config says."""

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rl_adapter.data import records
from rl_adapter.data.records import Item
from rl_adapter.data.rows import short

SHOWN = 5  # examples of a fault


@dataclasses.dataclass(frozen=True)
class Fault:
    """Records that were dropped."""

    name: str  # the field of the config that says what is done about it
    count: int
    examples: tuple[str, ...]  # the first of them: where, and what


@dataclasses.dataclass(frozen=True)
class Report:
    """What came of a split's records."""

    split: str
    read: Mapping[str, int]  # by source
    kept: Mapping[str, int]  # by source
    kinds: Mapping[str, int]  # kept, by kind
    envs: Mapping[str, int]  # kept, by environment; "": none
    dropped: tuple[Fault, ...] = ()
    tokens: tuple[int, float, int] | None = None  # of prompts: least, median, most

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def text(self) -> str:
        """A line for the split, one for each source of several, and those of each fault."""
        lengths = f", {self.tokens[0]} to {self.tokens[2]} tokens (median {self.tokens[1]:g})" if self.tokens else ""
        count = lambda kept, read: f"{kept}" if kept == read else f"{kept} of {read}"
        lines = [f"data.{self.split}: {count(sum(self.kept.values()), sum(self.read.values()))} records{lengths}"]
        if len(self.read) > 1:
            lines += [f"  {source}: {count(self.kept[source], n)}" for source, n in self.read.items()]
        for fault in self.dropped:
            lines.append(f"  dropped {fault.count} ({fault.name}):")
            lines += [f"    {example}" for example in fault.examples] + ["    ..."] * (fault.count > len(fault.examples))
        return "\n".join(lines)


def report(split: str, sources: Sequence[str], read: Sequence[Item], kept: Sequence[Item], dropped: tuple[Fault, ...] = ()) -> Report:
    problems = [item.problem for item in kept]
    counts = lambda names: {name: names.count(name) for name in sorted(set(names))}
    each = lambda items: {source: n for source, n in zip(sources, _tally([i.source for i in items], len(sources)))}
    return Report(split, each(read), each(kept), counts([p.kind for p in problems]), counts([p.env for p in problems]), dropped)


def _tally(numbers: Sequence[int], count: int) -> list[int]:
    out = [0] * count
    for n in numbers:
        out[n] += 1
    return out


def sift(
    items: list[Item], faulty: Mapping[int, str], name: str, policy: str, found: str, need: str
) -> tuple[list[Item], tuple[Fault, ...]]:
    """Without the faulty ones (index -> what is wrong), and the fault; or an error where the policy is "refuse".

    Args:
      name: the policy's field in the `data` section.
      found, need: for the message, after "found N of M records" and after "need".
    """
    if not faulty:
        return items, ()
    shown = tuple(f"{items[i].where}: {what}" for i, what in list(faulty.items())[:SHOWN])
    if policy == "refuse":
        some = "; ".join(shown) + ("; ..." if len(faulty) > len(shown) else "")
        count = f"{len(faulty)} of {len(items)} records"
        raise ValueError(f"data.{name}: found {count} {found} ({some}), need {need}, or data.{name}='drop'")
    left = [item for i, item in enumerate(items) if i not in faulty]
    if not left:
        raise ValueError(f"data.{name}: found none left when {len(faulty)} records {found} were dropped, need at least one")
    return left, (Fault(f"data.{name}", len(faulty), shown),)


def content(items: list[Item], data: Any, envs: Collection[str] | None = None) -> tuple[list[Item], tuple[Fault, ...]]:
    """Checks that need no tokenizer: environments that are known (`envs`; None: any), nothing blank, nothing twice, pairs that differ."""
    if envs is not None:
        for item in items:
            if item.problem.env and item.problem.env not in envs:
                need = f"one of {', '.join(sorted(envs)) or 'none, since none is known'}"
                raise ValueError(f"{item.where}: env: found {short(item.problem.env)}, need {need}")
    items, blank = sift(items, _blank(items), "empty", data.empty, "with a blank text", "some text")
    items, again = sift(items, _again(items), "duplicates", data.duplicates, "that repeat another", "distinct ones")
    return items, blank + again


def overlap(items: list[Item], others: Collection[str], data: Any) -> tuple[list[Item], tuple[Fault, ...]]:
    """Training records whose question (`records.key`) is held out too: they would void the evaluation."""
    both = {i: short(item.problem.prompt) for i, item in enumerate(items) if records.key(item.problem) in others}
    return sift(items, both, "overlap", data.overlap, "to train on that are held out too", "splits that do not meet")


def _blank(items: list[Item]) -> dict[int, str]:
    """A chat may end with a message of no text (a tool's, or an image), a pair with equal sides teaches nothing."""
    found = {}
    for i, item in enumerate(items):
        texts = (*(() if item.problem.messages else (item.problem.prompt,)), *item.completions)
        if not all(text.strip() for text in texts):
            found[i] = f"{short(next(text for text in texts if not text.strip()))} is blank"
        elif len(item.completions) == 2 and item.completions[0] == item.completions[1]:
            found[i] = f"{short(item.completions[0])} is both chosen and rejected"
    return found


def _again(items: list[Item]) -> dict[int, str]:
    found, first = {}, {}
    for i, item in enumerate(items):
        same = records.key(item.problem), item.completions
        if same in first:
            found[i] = f"{short(item.problem.prompt)} again, as in {first[same]}"
        else:
            first[same] = item.where
    return found


def lengths(items: list[Item], sizes: Sequence[int], limit: int, field: str, policy: str) -> tuple[list[Item], tuple[Fault, ...]]:
    """No record is ever cut: `sizes`, in tokens, of at most `limit`, which `field` sets."""
    long = {i: f"{size} tokens: {short(item.problem.prompt)}" for i, (item, size) in enumerate(zip(items, sizes)) if size > limit}
    if long and policy == "refuse":
        shown = "; ".join(f"{items[i].where}: {what}" for i, what in list(long.items())[:SHOWN]) + ("; ..." if len(long) > SHOWN else "")
        need = f"{max(sizes)} for {len(long)} of {len(items)} records ({shown}), or data.too_long='drop'"
        raise ValueError(f"{field}: found {limit}, need {need}")
    return sift(items, long, "too_long", policy, f"of more tokens than {field} = {limit}", "shorter ones")


def with_tokens(report: Report, sizes: Sequence[int]) -> Report:
    return dataclasses.replace(report, tokens=(min(sizes), statistics.median(sizes), max(sizes)))
