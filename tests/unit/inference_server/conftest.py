from __future__ import annotations

from tests.numeric.conftest import _one_thread, llama_dir  # noqa: F401 - fixtures here, too
