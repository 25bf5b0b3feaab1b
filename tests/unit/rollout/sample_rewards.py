"""Verifiers that misbehave, importable by name in the worker processes of the reward pool."""

import os
import sys
import time

from headway.contracts.errors import DataError
from headway.contracts.types import RewardResult


class Scores:
    """Returns what it was made with."""

    def __init__(self, value=1.0):
        self.value = value

    def __call__(self, prompt, completion, data):
        return self.value


class NotPicklable(Exception):
    def __init__(self, first, second):
        super().__init__(first)


def good():
    return lambda prompt, completion, data: RewardResult(0.5, {"seen": [prompt, completion, data]})


def hangs():
    def verify(prompt, completion, data):
        while True:
            time.sleep(0.01)

    return verify


def hangs_and_ignores_sigterm():
    def verify(prompt, completion, data):
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass

    return verify


def raises():
    def verify(prompt, completion, data):
        raise ZeroDivisionError("of no use")

    return verify


def raises_a_data_error():
    def verify(prompt, completion, data):
        raise DataError("row 7 has no answer")

    return verify


def raises_what_cannot_be_sent():
    def verify(prompt, completion, data):
        raise NotPicklable("one", "two")

    return verify


def explains_itself_badly():
    details = {"error": NotPicklable("one", "two"), "seen": {1: (2, 3)}}
    return lambda prompt, completion, data: RewardResult(0.5, details)


def dies():
    return lambda prompt, completion, data: os._exit(3)


def exits():
    return lambda prompt, completion, data: sys.exit(0)


def returns(kind):
    """What JSON arguments cannot carry."""
    value = {
        "nan": float("nan"),
        "inf": float("inf"),
        "nan in a result": RewardResult(float("nan")),
        "text in a result": RewardResult("high"),
        "nothing in a result": RewardResult(None),
        "nothing": None,
        "text": "1.0",
        "a list": [1.0],
    }[kind]
    return lambda prompt, completion, data: value
