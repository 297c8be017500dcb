"""Pages made from code are current. That of the settings is in tests/unit/test_config.py."""

from __future__ import annotations

import re
import subprocess
import sys

import hvdlite
import hvdlite.keras
import hvdlite.tensorflow
import hvdlite.torch


def test_the_page_of_names_is_current(root):
    done = subprocess.run(
        [sys.executable, root / "docs/reference/make_api.py"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert (root / "docs/reference/api.md").read_text() == done.stdout, "run `make docs`"


def test_the_page_of_names_has_every_name_and_says_something_of_it(root):
    rows = re.findall(r"^\| `(\w+).*` \| (.*) \|$", (root / "docs/reference/api.md").read_text(), re.MULTILINE)
    names = {
        name
        for name in {*hvdlite.__all__, *hvdlite.torch.__all__, *hvdlite.tensorflow.__all__, *hvdlite.keras.__all__}
        if not name.startswith("__")
    }
    assert {name for name, _ in rows} == names
    assert not [name for name, text in rows if not text]


def test_links_between_pages_lead_somewhere(root):
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "benchmarks").glob("*.md")]
    dead = [
        f"{page.relative_to(root)}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not dead
