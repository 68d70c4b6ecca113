"""Makes the pictures of docs/page.md from two small runs on this machine's CPUs, in Debian's Chromium with the
font Inter (apt-get install chromium chromium-driver fonts-inter). In the first run, rank 2 of 4 sleeps in every step
from the 150th on, so that there is a slow rank to see.

    python tools/page_pictures.py docs [FOLDER]

FOLDER keeps the runs `speech-1` and `speech-2`; those that are there are taken. Without it they are trained in a
folder that is removed, which takes some minutes.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from page.browser import Browser, chromium  # noqa: E402

RUNS = {
    "speech-1": ["--gpus", "4"],
    "speech-2": ["--gpus", "2", "training.lr=2.0e-3"],
}
COMMON = ["training.steps=240", "training.warmup_steps=40", "evaluation.every_steps=60"]
DESKTOP, TALL, PHONE = (1180, 760), (1180, 800), (390, 780)
SLEEPING = """
import os
if os.environ.get("RANK") == "2":
    import time
    import torch
    real, calls = torch.nn.Module.__call__, 0
    def forward(self, *args, **kwargs):
        global calls
        if type(self).__name__ == "LMUCTC" and self.training:
            calls += 1
            time.sleep(0.4 if calls >= 150 else 0)
        return real(self, *args, **kwargs)
    torch.nn.Module.__call__ = forward
"""


def train(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(SLEEPING)
    for name, words in RUNS.items():
        if not (folder / "runs" / name).is_dir():
            command = ["train", "speech", *COMMON, "--run", name, *words]
            path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
            variables = os.environ | ({"PYTHONPATH": path} if name == "speech-1" else {})
            words = [sys.executable, "-m", "muster", *command]
            subprocess.run(words, cwd=folder, check=True, env=variables)


def take(browser: Browser, folder: Path, into: Path) -> None:
    one, both = folder / "one.html", folder / "both.html"
    runs = [f"runs/{name}" for name in RUNS]
    for file, names in ((one, runs[:1]), (both, runs)):
        command = ["report", *names, "-o", str(file)]
        subprocess.run([sys.executable, "-m", "muster", *command], cwd=folder, check=True)
    for scheme, file in (("light", "page.png"), ("dark", "page-dark.png")):
        browser.scheme(scheme)
        picture(browser, one.as_uri(), DESKTOP, into / file)
    browser.scheme("light")
    picture(browser, one.as_uri(), DESKTOP, into / "page-ranks.png", "#ranks")
    picture(browser, one.as_uri(), PHONE, into / "page-phone.png")
    picture(browser, both.as_uri(), TALL, into / "page-compare.png")


def picture(
    browser: Browser, address: str, size: tuple[int, int], file: Path, selector: str | None = None
) -> None:
    from PIL import Image

    browser.size(*size)
    browser.open(address)
    time.sleep(1.0)
    browser.picture(file, selector)
    Image.open(io.BytesIO(file.read_bytes())).convert("RGB").save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def main(into: str, keep: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(keep or temporary).resolve()
        train(folder)
        with chromium() as browser:
            take(browser, folder, Path(into))


if __name__ == "__main__":
    main(*sys.argv[1:])
