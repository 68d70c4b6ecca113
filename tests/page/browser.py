"""Debian's Chromium, headless, driven through the chromedriver that comes with it: nothing is downloaded."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromedriver")
WINDOW = (1280, 900)


def missing() -> str:
    """Why there is no browser, in words; empty where there is one."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"needs {' and '.join(absent)}: apt-get install chromium chromium-driver" * bool(absent)


@contextmanager
def chromium() -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for switch in (
        "--headless=new",
        "--no-sandbox",  # which root cannot have
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--hide-scrollbars",
        "--mute-audio",
        "--autoplay-policy=no-user-gesture-required",
        f"--window-size={WINDOW[0]},{WINDOW[1]}",
    ):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_script_timeout(30)
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        """From the beginning, also where only the part behind # differs."""
        self.driver.get("about:blank")
        self.driver.get(address)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """What can be read there now; empty where there is nothing."""
        script = (
            "const found = document.querySelector(arguments[0]);"
            "return (found?.innerText ?? found?.textContent ?? '').replace(/\\u202f/g, ' ')"
        )
        return str(self.run(script, selector))

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def press(self, *keys: str) -> None:
        """Into what has the focus."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        """`light` or `dark`, as the system would say."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def offline(self, on: bool) -> None:
        self.driver.execute_cdp_cmd("Network.enable", {})
        conditions = {"offline": on, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.driver.execute_cdp_cmd("Network.emulateNetworkConditions", conditions)

    def errors(self) -> list[str]:
        """What the console complained of since the last call."""
        return [
            line["message"] for line in self.driver.get_log("browser") if line["level"] == "SEVERE"
        ]

    def requests(self) -> list[str]:
        """Addresses asked for since the last call."""
        told = [
            json.loads(line["message"])["message"] for line in self.driver.get_log("performance")
        ]
        return [
            message["params"]["request"]["url"]
            for message in told
            if message["method"] == "Network.requestWillBeSent"
        ]

    def picture(self, file: Path, selector: str | None = None) -> None:
        """Of the window, or of one element over the whole width of the page."""
        options: dict[str, Any] = {"format": "png"}
        if selector:
            box = self.run(
                "const r = document.querySelector(arguments[0]).getBoundingClientRect();"
                "return [r.y + scrollY, document.documentElement.clientWidth, r.height]",
                selector,
            )
            options |= {
                "captureBeyondViewport": True,
                "clip": {"x": 0, "y": box[0], "width": box[1], "height": box[2], "scale": 1},
            }
        taken = self.driver.execute_cdp_cmd("Page.captureScreenshot", options)
        file.write_bytes(base64.b64decode(taken["data"]))
