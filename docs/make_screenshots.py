"""Take the pictures of docs/dashboard.md: `python docs/make_screenshots.py` (needs chromium-driver).

A real gateway and three servers play for a minute and a half; what they sample comes from
`tests/integration/storyteller.py`, so that the text can be read.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.integration.browser import Browser, browsing  # noqa: E402
from tests.integration.dashboard_scene import Stage, staged  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SECONDS = 90.0
STEP_S = 1.4
MAX_BYTES = 300_000


def main() -> None:
    """Write both pictures."""
    with tempfile.TemporaryDirectory() as folder, staged(Path(folder), 3, 0.025) as stage:
        stage.attach(max_staleness=2)
        stage.submit(20)
        with browsing() as browser:
            browser.driver.get(f"{stage.url}/ui")
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                stage.train()
                stage.submit(stage.batch)
                time.sleep(STEP_S)
            browser.find("#pulse", "live")
            _take(browser, "dashboard.png")
            browser.driver.get(f"{stage.url}/ui#/rollouts/{_telling(stage)}")
            browser.find(".tokens [data-version]")
            _take(browser, "trajectory.png")


def _telling(stage: Stage) -> str:
    """A rollout whose siblings differ in reward and that saw several versions; else the newest."""
    for number in reversed(range(stage.submitted)):
        view = stage.client.get(f"train-{number:05d}")
        if view.group is None or view.summary.state != "consumed":
            continue
        rewards = [row.reward for row in view.group.trajectories]
        versions = [len(set(row.versions) - {-1}) for row in view.group.trajectories]
        if rewards[0] > min(rewards) and versions[0] > 1:
            return view.summary.rollout_id
    return f"train-{stage.submitted - 1:05d}"


def _take(browser: Browser, name: str) -> None:
    path = IMAGES / name
    browser.driver.save_screenshot(str(path))
    if path.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes, more than {MAX_BYTES}")


if __name__ == "__main__":
    main()
