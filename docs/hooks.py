"""For the site: links to folders, and to files that are not pages of it, lead to the repository."""

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)(\[[^\]]*\]\()([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs for every page."""
    folder = posixpath.dirname(page.file.src_uri)
    pages = {file.src_uri for file in files if file.inclusion.is_included()}

    def replaced(match: re.Match[str]) -> str:
        target = match[2]
        if "://" in target or target.startswith(("mailto:", "/")):
            return match[0]
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if path.removeprefix("docs/") in pages and path.startswith("docs/"):
            return match[0]
        kind = "blob" if "." in posixpath.basename(path) else "tree"
        return f"{match[1]}{config['repo_url']}/{kind}/main/{path}{match[3] or ''})"

    return _LINK.sub(replaced, markdown)
