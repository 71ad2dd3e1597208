"""When two mathematical answers are the same: every surprise of math-verify is decided by rule."""

import pytest

pytest.importorskip("math_verify")

from rl_adapter.rewards import maths

SAME = [
    ("42", "42"),
    ("42", "42.0"),
    ("42", "042"),
    ("42", "$42$"),
    ("42", r"\(42\)"),
    ("42", "+42"),
    ("2,000", "2000"),
    ("-3", "-3"),
    ("$5", r"\$5"),
    ("1/2", r"\frac12"),
    ("1/2", "0.5"),
    ("0.5", r"\frac{1}{2}"),
    (r"-\frac{1}{2}", "-0.5"),
    ("5.5", "5 1/2"),
    ("11/2", "5 1/2"),
    ("5 1/2", r"5\frac{1}{2}"),
    ("1500", "1.5e3"),
    ("1.5e3", "1500"),
    ("30000", r"3 \cdot 10^4"),
    (r"3\times10^{4}", "30000"),
    ("2^{10}", "1024"),
    (r"\sqrt{2}", r"\sqrt2"),
    ("x^2+1", "1+x^2"),
    ("2x", r"x\cdot2"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("y=2x+1", "2x+1"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\{1,2\}", "1,2"),
    ("1,2", "2,1"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("(1,2)", "(1,2)"),
    ("(1,2)", "1,2"),
    ("x=1,x=2", "1,2"),
    ("1<x<2", r"x\in(1,2)"),
    (r"x\in(1,2)", "1<x<2"),
    ("x>2", r"(2,\infty)"),
    (r"(2,\infty)", "x>2"),
    ("10 cm", "10 cm"),
    ("10 cm", "10"),
    ("10", "10 cm"),
    (r"10\text{ cm}", "10 cm"),
    (r"30^\circ", "30"),
    ("50", "50%"),
    (r"50\%", "50%"),
    ("12", "12 apples"),
    ("10_2", "10_2"),
    ("10_2", "10"),
    ("10", "10_{10}"),
    ("FF_{16}", "ff_{16}"),
    ("Tuesday", "tuesday"),
    (r"\text{Tuesday}", "Tuesday"),
    ("A", r"\text{(A)}"),
    ("New York", "new  york"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
]
OTHER = [
    ("42", "41"),
    ("42", "42 or 43"),
    ("42", "41, 42"),
    ("42", ""),
    ("42", "nan"),
    ("42", r"\infty"),
    ("42", "x"),
    ("42", "no idea"),
    ("0", "1/0"),
    ("1", "True"),
    ("1/3", "0.333"),
    (r"\pi", "3.14"),
    ("3", "-3"),
    ("3.5", "3,5"),
    ("1e400", "2e400"),
    ("42", "6*7"),
    ("42", "26+16"),
    ("1024", "2^{10}"),
    ("42", r"6\times7"),
    ("3", r"\sqrt{9}"),
    ("42", "9^{9^{9^9}}"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "2,1"),
    ("[1,2]", "(1,2)"),
    ("(1,2]", "(1,2)"),
    ("1,2", "1"),
    ("1,2", "1,2,3"),
    ("1<x<2", "1<x<3"),
    ("10 cm", "10 m"),
    ("5 cm", "5 cm^2"),
    ("50%", "0.5"),
    ("0.5", "50"),
    ("50", "0.5"),
    ("10", "10_2"),
    ("10_2", "10_3"),
    ("FF_{16}", "FE_{16}"),
    ("Tuesday", "Monday"),
    ("silent", "listen"),
    ("A", "B"),
    ("x", "y"),
    ("2x", "3x"),
    ("3x", "3"),
]


@pytest.mark.parametrize("gold, answer", SAME)
def test_the_same(gold, answer):
    assert maths.equal(gold, answer) and maths.equal(gold, gold)


@pytest.mark.parametrize("gold, answer", [pair for pair in OTHER if pair[0] != "1e400"])
def test_not_the_same(gold, answer):
    assert not maths.equal(gold, answer)


@pytest.mark.parametrize("gold", ["", "  ", "$$", "\\frac{", "}{", "1e400"])
def test_a_gold_answer_that_cannot_be_read_equals_nothing(gold):
    for answer in (gold, "42", "", "x"):
        for text in (f"Answer: {answer}", f"\\boxed{{{answer}}}"):
            with pytest.raises(ValueError, match="answer: found .*which math-verify cannot read"):
                maths.score(text, gold, "Answer:")


@pytest.mark.parametrize(
    "text, found",
    [
        (r"so \boxed{41}, no: \boxed{42}", "42"),
        ("Answer: 41\n\\boxed{42}", "42"),
        (r"\boxed{41} Answer: 42", "42"),  # of box and mark the later
        (r"\boxed{41} or \boxed{42", None),  # cut off
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{}", None),
        (r"Answer: \boxed{7}.", "7"),
        ("Answer: 41. Wait, it is 42", "41"),
        ("Answer: 3.14.", "3.14"),
        ("Answer: \n 7 \n 8", "7"),
        ("Answer: 7\nAnswer:", None),
        ("42", None),
        ("", None),
        ("Answer: " + "1" * 1000, None),
    ],
)
def test_what_the_answer_is(text, found):
    assert maths.extract(text, "Answer:") == found


@pytest.mark.parametrize("text, found", [("42", "42"), (" 42. So it is", "42"), ("", None), (r"I get \boxed{42}", "42"), ("42\n43", "42")])
def test_without_a_mark_the_answer_comes_first(text, found):
    assert maths.extract(text, "") == found


def test_scores_are_the_two_together():
    assert maths.score("Answer: 1/2", "0.5", "Answer:") == 1.0
    assert maths.score("Answer: 1/3", "0.5", "Answer:") == maths.score("0.5", "0.5", "Answer:") == 0.0
