"""A report's page as a test reads it."""

import html.parser
import re
import shutil
import subprocess
from pathlib import Path

from fedjax_bn.report.page import write_comparison

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page(html.parser.HTMLParser):
    """The tables of a page as texts, its paragraphs, its tags, and what it says."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables, self.paragraphs, self.tags, self.attributes = [], [], [], []
        self.open, self.text, self.said = None, text, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.open = "cell"
        elif tag == "p":
            self.paragraphs.append("")
            self.open = "p"
        elif tag == "strong":
            self.tables[-1][-1][-1] += "*"
        elif tag == "small":
            self.tables[-1][-1][-1] += " | "

    def handle_endtag(self, tag):
        if tag in ("td", "th", "p"):
            self.open = None

    def handle_data(self, data):
        self.said += data
        if self.open == "cell":
            self.tables[-1][-1][-1] += data
        elif self.open == "p":
            self.paragraphs[-1] += data


def page_of(folder: Path, name: str = "page", **options: str) -> Page:
    """The page on all runs in a folder, written into it beside its tables."""
    write_comparison([folder], folder / f"{name}.html", **options)
    return Page((folder / f"{name}.html").read_text())


def curves_of(text: str) -> list[tuple[str, str, str]]:
    """(name, rounds, values) of every curve, as texts."""
    return re.findall(r'data-name="([^"]*)" data-x="([^"]*)" data-y="([^"]*)"', text)


def in_browser(text: str, script: str, folder: Path) -> str:
    """The page as Chromium has it once a script of the reader's has run."""
    page = folder / "page-in-browser.html"
    page.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run")
    command = [CHROMIUM, *options, f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    return subprocess.run(
        [*command, f"file://{page}"], capture_output=True, text=True, timeout=120, check=True
    ).stdout
