"""math-verify with its first parses behind it: imported where workers are forked from, and nowhere else.

The first expression costs 0.3 s of tables, and the first of each kind 0.05 s more, because the parser
learns its grammar as it reads; a fresh worker would pay for them on the clock of an answer.
"""

from math_verify import parse, verify

KINDS = (
    *("x^2 + 2x - 1", "(a + 5)(b - 2)", "e^{2x}", "4210_{5}", r"\log_{2} 3", r"3\sqrt{13}", "f(x)"),
    *(r"\left(3, \frac{\pi}{2}\right)", "[-2, 7]", r"\{1 \pm \sqrt{5}, -2\}", r"x \in [-2, 7]"),
    *(r"(-\infty, 2) \cup (3, \infty)", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
)

verify(parse(r"\boxed{\frac{1}{2}}"), parse(r"\boxed{0.5}"))
for kind in KINDS:
    parse(rf"\boxed{{{kind}}}")
