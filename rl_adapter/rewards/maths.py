"""Equality of mathematical answers, by math-verify (which parses LaTeX into sympy). Runs in a killable worker: no timeouts of its own.

math-verify reads generously. What it would get wrong is decided here by rule, before it sees the text:

- The answer is the last whole `\\boxed{...}`, or what follows the last mark on its line; of the two, the later. Two boxes are no set.
- A line ends as an answer where a sentence does: "41. Wait, it is 42" says 41. A box that is cut off is none.
- A unit, a percent sign or the base of a numeral may be left out; written on both sides it must be the same. 10 cm is not 10 m, 50 is 50 %,
  50 % is not 0.5. A base that only the answer writes must be ten.
- `5 1/2` is five and a half; `1.5e3` is 1500.
- Where the gold answer is a number, the answer is one too, not a calculation: 6*7 is not 42, or copying the question would be rewarded.
- Words are compared as words. (As math they are products of letters: "listen" would equal "silent".)
- A list without brackets is a set, unless the other one is in parentheses: then its order counts too.
- A relation may stand on either side (`1<x<2`, `x\\in(1,2)`): equal one way round is equal.
"""

import functools
import re

from math_verify import LatexExtractionConfig, parse, verify

from rl_adapter.rewards.exact import LONGEST_ANSWER, TRAILING, WINDOW

_NUMBER = r"[+-]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)"
_FRACTION = rf"[+-]?(?:\\[dt]?frac\{{\s*{_NUMBER}\s*\}}\{{\s*{_NUMBER}\s*\}}|\\[dt]?frac\s*\d\s*\d|{_NUMBER}\s*/\s*{_NUMBER})"
_MIXED = re.compile(r"(?P<sign>[+-]?)(?P<whole>\d+)\s+(?P<top>\d+)\s*/\s*(?P<bottom>\d+)")
_POWER = re.compile(rf"(?P<digits>{_NUMBER})[eE](?P<power>[+-]?\d+)")
_PLAIN = re.compile(rf"{_NUMBER}|{_FRACTION}|{_NUMBER}(?:\\cdot|\\times|\*)10\^(?:\{{[+-]?\d{{1,3}}\}}|\d)|\d+{_FRACTION}")
_BASE = re.compile(r"(?P<digits>[0-9A-Fa-f]+)_\{?(?P<base>\d+)\}?")
_SPACE = r"(?:\s|~|\\[,;: !])"
_SET = r"\\(?:text|mathrm|textrm|mbox)\s*\{\s*[^{}]*\}"
_UNIT = re.compile(
    rf"(?P<value>.*[\d.)}}]){_SPACE}*(?P<unit>\\?%|\^\{{?\\circ\}}?|°|(?:{_SET}|(?<=[\s,;:!~])[A-Za-z]{{1,20}})(?:\^\{{?\d\}}?)?)",
    re.DOTALL,
)
_WORDS = re.compile(r"(?:\\(?:text|textbf|mathrm|textrm|mbox)\s*\{)?\s*\(?(?P<words>[^\W\d_]+(?:[ '-]+[^\W\d_]+)*)\)?\s*\}?")


def extract(text: str, mark: str) -> str | None:
    """The answer that a completion gives; None for none."""
    text = text[-WINDOW:] if mark else text[:WINDOW]
    box, at = _last_box(text)
    place = text.rfind(mark)
    if box is not None and (at > place or not mark):
        return box
    if mark and place < 0:
        return None
    line = text[place + len(mark) if mark else 0 :].strip().split("\n")[0]
    return _fits(re.split(r"(?<=[^\s])[.!?](?=\s)", line)[0].rstrip(TRAILING))


def _last_box(text: str) -> tuple[str | None, int]:
    """What the last box with balanced braces holds, and where it begins; None where the last one is cut off."""
    at = text.rfind("\\boxed{")
    depth = 0
    for i in range(at + len("\\boxed"), len(text)) if at >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[i], 0) if text[i - 1] != "\\" else 0
        if not depth:
            return _fits(text[at + len("\\boxed{") : i]), at
    return None, at


def _fits(answer: str) -> str | None:
    answer = answer.strip()
    return answer if 0 < len(answer) <= LONGEST_ANSWER else None


def equal(gold: str, answer: str) -> bool:
    """Whether two answers are the same. ValueError where the gold answer cannot be read: then nothing can equal it."""
    want = _read(gold)
    if want is None:
        raise ValueError(f"answer: found {gold!r}, which math-verify cannot read, need a mathematical expression")
    if _listed(answer) and _paired(gold):
        answer = f"({answer})"
    elif _listed(gold) and _paired(answer):
        want = _read(f"({gold})") or want
    found = _read(answer)
    if found is None:
        return False
    if want.words or found.words:
        return want.words == found.words
    if want.unit and found.unit and want.unit != found.unit:
        return False
    if found.base != want.base and not (found.base == "" or (want.base == "" and found.base == "10")):
        return False
    if want.plain and not found.plain:
        return False
    one, other = want.value, found.value
    return bool(verify([one], [other], timeout_seconds=None)) or bool(verify([other], [one], timeout_seconds=None))


def _paired(text: str) -> bool:
    return "," in text and bool(re.fullmatch(r"(?:\\left)?\(.*\)", _undress(text), re.DOTALL))


def _listed(text: str) -> bool:
    return "," in text and not re.search(r"[()\[\]{}<>]", text)


class _Answer:
    def __init__(self, value, words="", unit="", base="", plain=False):
        self.value, self.words, self.unit, self.base, self.plain = value, words, unit, base, plain


def _read(text: str) -> _Answer | None:
    text = _undress(text)
    words = _WORDS.fullmatch(text)
    if words and len(words["words"]) > 1:
        return _Answer(None, words=" ".join(words["words"].lower().split()))
    unit = ""
    if match := _UNIT.fullmatch(text):
        text, unit = match["value"].strip(), re.sub(r"\\(text|mathrm|textrm|mbox)\b|[\s{}\\]", "", match["unit"])
    base = ""
    if match := _BASE.fullmatch(text):
        text, base = match["digits"], match["base"]
    start, _, rest = text.rpartition("=")
    literal = rest.strip() if re.fullmatch(r"\s*[A-Za-z]\w?\s*", start) else text
    literal = literal.replace("\\left", "").replace("\\right", "").strip()
    if match := _MIXED.fullmatch(literal):
        text = literal = rf"{match['sign']}{match['whole']}\frac{{{match['top']}}}{{{match['bottom']}}}"
    if match := _POWER.fullmatch(literal):
        if abs(int(match["power"][:6])) > 300:
            return None
        text = literal = rf"{match['digits']}\cdot10^{{{int(match['power'])}}}"
    plain = bool(_PLAIN.fullmatch(re.sub(r"(?<=[\d.])\s*(\\cdot|\\times|\*)\s*", r"\1", literal)))
    if base and not plain:  # a numeral with letters for digits
        return _Answer(None, words=text.lower(), base=base)
    value = _parse(text)
    return None if value is None else _Answer(value, unit=unit, base=base, plain=plain)


def _undress(text: str) -> str:
    """Without what sets it as math."""
    text = text.strip()
    for mark in ("$$", "$", "\\(", "\\)", "\\[", "\\]", "\\displaystyle", "**", "`"):
        text = text.removeprefix(mark).removesuffix(mark).strip()
    return text.replace("\\$", "").replace("$", "").strip()


@functools.lru_cache(maxsize=64)
def _parse(text: str):
    if not text:
        return None
    settings = [LatexExtractionConfig()]
    found = parse(f"${text}$", extraction_config=settings, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None)
    return next((x for x in found if not isinstance(x, str)), None)


def score(text: str, gold: str, mark: str) -> float:
    answer = extract(text, mark)
    if answer is None:
        _check(gold)
        return 0.0
    return float(equal(gold, answer))


def _check(gold: str) -> None:
    equal(gold, "0")
