"""The reward of `against_trl.py`, as a gateway knows it."""

from __future__ import annotations

from against_trl_task import share_of_digits

from headway import Answer, RewardResult, register_reward


class DigitShare:
    """Settled on the event loop: no process is asked, as TRL asks none."""

    def quick(self, answer: Answer) -> RewardResult:
        return RewardResult(share_of_digits(answer.completion))

    def __call__(self, answer: Answer) -> RewardResult:
        return self.quick(answer)


register_reward("digit_share", DigitShare)
