"""Pages of documents with tables that are made of results."""

from pathlib import Path


def write(page: Path, name: str, text: str) -> None:
    """Replace what stands between the page's marks of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.read_text("utf-8").split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n{text}{end}{after}", "utf-8")
