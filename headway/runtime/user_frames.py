"""Where a function of a user's raised."""

from __future__ import annotations

import os
import traceback
from itertools import dropwhile
from pathlib import Path

import headway

MAX_FRAMES = 16
MAX_CHARS = 2000
_ROOT = Path(headway.__file__).parents[1]
_OURS = tuple(f"{_ROOT / name}{os.sep}" for name in ("headway", "gateway"))


def user_frames(error: BaseException) -> str:
    """The end of an error's traceback, from the first frame that is not of these packages."""
    frames = traceback.extract_tb(error.__traceback__, -MAX_FRAMES)
    own = list(dropwhile(lambda frame: frame.filename.startswith(_OURS), frames))
    return "".join(traceback.format_list(own or frames[-1:]))[-MAX_CHARS:].rstrip()
