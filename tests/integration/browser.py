"""A real headless Chromium, offline but for loopback."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
WAIT_S = 20.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


SHOWN = """
const [selector, text] = arguments;
return [...document.querySelectorAll(selector)].filter((one) => {
  const box = one.closest("select") ?? one;
  return box.checkVisibility({ visibilityProperty: true }) && one.innerText.includes(text);
});
"""
"""What is shown of a selector and holds a text, in one question: the page may change between two."""


class Browser:
    """What a person does with a page, and sees."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def find(self, selector: str, text: str = "") -> WebElement:
        """The first shown element of a selector that holds a text, once it is there."""

        found: list[WebElement] = self._until(
            lambda: self._shown(selector, text), f"{selector} with {text!r}"
        )
        return found[0]

    def gone(self, selector: str) -> None:
        """Wait until nothing of a selector is shown."""
        self._until(lambda: not self._shown(selector), f"no {selector}")

    def all(self, selector: str) -> list[WebElement]:
        """The elements of a selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> list[str]:
        """The text of each element of a selector, as it is in the document."""
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
        return list(self.driver.execute_script(script, selector))

    def errors(self) -> list[str]:
        """What the console has said since it was asked, but for answers 401."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE" and "401 (Unauthorized)" not in entry["message"]
        ]

    def _shown(self, selector: str, text: str = "") -> list[WebElement]:
        return list(self.driver.execute_script(SHOWN, selector, text))

    def _until(self, look: Callable[[], Any], what: str) -> Any:
        # An element may be replaced while it is looked at.
        wait = WebDriverWait(
            self.driver, WAIT_S, 0.05, ignored_exceptions=[StaleElementReferenceException]
        )
        return wait.until(lambda _: look(), f"not within {WAIT_S:g} s: {what}")


@contextmanager
def browsing(width: int = 1280, height: int = 800, is_dark: bool = False) -> Iterator[Browser]:
    """A browser with a window of this size."""
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.binary_location = CHROMIUM or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield Browser(driver)
    finally:
        driver.quit()
