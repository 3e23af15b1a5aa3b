"""Pages of the site: README.md, docs/ and a reference page for each verb, as the program tells its flags.

make_pages.py ECHELON DIRECTORY writes them anew into DIRECTORY/pages, beside DIRECTORY/mkdocs.yml:

    python3 site/make_pages.py build/release/echelon build/site
    mkdocs build --strict --config-file build/site/mkdocs.yml

Links to what is no page of the site (sources, presets) become plain text. Every page is in the nav of
mkdocs.yml, and the nav names no other: otherwise this fails.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Iterator, List, Tuple

ROOT = Path(__file__).resolve().parents[1]


def page_of(path: Path) -> str:
    """Where a file of the repository is in the site; empty: nowhere."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.parent == ROOT / "docs" and path.suffix in (".md", ".svg") and path.is_file():
        return path.name
    if path.parent == ROOT and path.suffix == ".md" and path.is_file():
        return path.name
    return ""


def relinked(text: str, source: Path) -> str:
    def link(match: "re.Match[str]") -> str:
        mark, words, target = match.groups()
        where, hash_, anchor = target.partition("#")
        if "://" in target or not where:
            return match[0]
        path = Path(os.path.normpath(source.parent / where))
        if not path.exists():
            raise SystemExit(f"{source}: {target}: there is no such file")
        page = page_of(path)
        return f"{mark}[{words}]({page}{hash_}{anchor})" if page else words

    lines, fence = [], False
    parts = re.split(r"(^```.*$)", text, flags=re.MULTILINE)
    for part in parts:
        if part.startswith("```"):
            fence = not fence
        elif not fence:
            part = re.sub(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", link, part)
        lines.append(part)
    return "".join(lines)


def help_of(echelon: str, words: List[str]) -> str:
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(
        [echelon, *words, "--help"], check=True, capture_output=True, text=True, env=environment
    ).stdout


def references(echelon: str, words: List[str]) -> Iterator[Tuple[List[str], str]]:
    """A verb's help and, behind it, those of its own verbs."""
    told = help_of(echelon, words)
    yield words, told
    _, _, verbs = told.partition("\nVerbs:\n")
    for verb in re.findall(r"^  ([a-z]\S*)  ", verbs, re.MULTILINE):
        if verb != "help":
            yield from references(echelon, [*words, verb])


def reference(words: List[str], told: str) -> str:
    what = " ".join(told.partition("\nUsage:")[0].split())
    return f"# {' '.join(['echelon', *words])}\n\n{what}\n\n```text\n{told.rstrip()}\n```\n"


def check_nav(pages: Path) -> None:
    _, _, nav = (ROOT / "site/mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    named = set(re.findall(r"[\w./-]+\.md$", nav, re.MULTILINE))
    written = {str(path.relative_to(pages)) for path in pages.rglob("*.md")}
    for pages_of, what in [(written - named, "not in the nav"), (named - written, "in the nav, but there is no such page")]:
        if pages_of:
            raise SystemExit(f"site/mkdocs.yml: {what}: {', '.join(sorted(pages_of))}")


def main() -> None:
    echelon, place = os.path.abspath(sys.argv[1]), Path(sys.argv[2])
    pages = place / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    (pages / "reference").mkdir(parents=True)
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").iterdir()]:
        page = page_of(path)
        if page.endswith(".md"):
            (pages / page).write_text(relinked(path.read_text(encoding="utf-8"), path), encoding="utf-8")
        elif page:
            shutil.copy(path, pages / page)
    for words, told in references(echelon, []):
        name = "-".join(["echelon", *words])
        (pages / "reference" / f"{name}.md").write_text(reference(words, told), encoding="utf-8")
    check_nav(pages)
    shutil.copy(ROOT / "site/mkdocs.yml", place / "mkdocs.yml")


if __name__ == "__main__":
    main()
