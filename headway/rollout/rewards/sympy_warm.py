"""math-verify with its first parse behind it: imported where workers are forked from, and nowhere else.

The first expression costs 0.3 s of tables; a fresh worker would pay for them on the clock of an answer.
"""

from math_verify import parse, verify

verify(parse(r"\boxed{\frac{1}{2}}"), parse(r"\boxed{0.5}"))
