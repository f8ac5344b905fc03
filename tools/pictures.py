"""Take the pictures in docs/images: the demo's panel, a page after a decision, three trainings compared.

Run it after a change of the page: ``python tools/pictures.py``. It needs chromium and playwright.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fedmerit.cli.run import DEMO
from fedmerit.config import as_toml

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
"""With which chromium runs without a display and asks nothing of the network; tests take them too."""
COLOURS = 160
"""Of a picture: enough for text and charts, in a part of the bytes."""


def fedmerit(*arguments: str, folder: Path) -> None:
    """Run a command of fedmerit in a folder."""
    start = "from fedmerit.cli import main; main()"
    ours = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", start, *arguments]
    subprocess.run(command, cwd=folder, env=ours, check=True, capture_output=True)  # noqa: S603 - ours


def pages(folder: Path) -> dict[str, Path]:
    """Make the pages; return the name of each picture and its page."""
    fedmerit("demo", folder=folder)
    fedmerit("rewards", "runs/demo", "--budget", "10000.00 EUR", folder=folder)
    fedmerit("page", "runs/demo", folder=folder)
    for name in ("Abbey", "Castle", "Dale"):
        fedmerit("approve", "runs/demo", "--key", f"runs/demo/keys/{name}.pem", folder=folder)
    (folder / "demo.toml").write_text(as_toml(DEMO), encoding="utf-8")
    fedmerit("run", "demo.toml", "--repeat", "3", "--out", "runs/again", folder=folder)
    return {
        "panel": folder / "runs" / "demo-panel" / "page-demo-panel.html",
        "page": folder / "runs" / "demo" / "page-demo.html",
        "comparison": folder / "runs" / "again" / "comparison.html",
    }


def picture(path: Path, height: int, scale: float) -> bytes:
    """Return the top of a page as PNG, as it is in a window of 1100 pixels."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        size = {"width": 1100, "height": height}
        tab = browser.new_context(viewport=size, device_scale_factor=scale, offline=True).new_page()
        tab.goto(path.resolve().as_uri())
        tab.wait_for_selector("html[data-drawn=yes]", state="attached")
        taken = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
        browser.close()
    made = io.BytesIO()
    taken.quantize(COLOURS).save(made, "PNG", optimize=True)
    return made.getvalue()


def main() -> None:
    """Take all pictures."""
    with tempfile.TemporaryDirectory() as folder:
        made = pages(Path(folder))
        for name, height, scale in (("panel", 1400, 1.25), ("page", 1300, 1.5), ("comparison", 2200, 1.0)):
            (IMAGES / f"{name}.png").write_bytes(picture(made[name], height, scale))
            sys.stdout.write(f"wrote {IMAGES / name}.png\n")


if __name__ == "__main__":
    main()
