"""Write a corpus from text that comes with every Python: the standard library's sources and documentation.

    python tools/quickstart/make_corpus.py --output-dir DIR

DIR/train.jsonl and DIR/heldout.jsonl contain one JSON object per document, {"name": ..., "text": ...}. A document
is a module or a chapter of Python's built-in help. Documents are held out by a hash of their names; no text is in
both files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.base.atomic import atomic_write
from megatron.base.errors import UserError

HELDOUT_SHARE = 0.05

EXCLUDED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",  # generated tables, nearly the same in each file: the model would know a held-out one
    "idle_test",
    "lib2to3",  # its tokenizer is a copy of another module's
    "pydoc_data",  # included as chapters instead
    "site-packages",
    "test",
    "tests",
}


@dataclass(frozen=True)
class Document:
    name: str
    text: str

    @property
    def is_heldout(self) -> bool:
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64


def library_documents(folder: Path) -> Iterator[Document]:
    """Read the modules below a folder of Python sources, by name, without files that do not decode."""
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if EXCLUDED_FOLDERS.intersection(relative.parts) or path.name.startswith("_sysconfigdata"):
            continue
        try:
            with tokenize.open(path) as stream:  # honors the file's coding line
                text = stream.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        if text.strip():
            yield Document(relative.as_posix(), text)


def help_documents() -> Iterator[Document]:
    """Read the chapters of Python's built-in help; none if the system does not install them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name, text in sorted(topics.items()):
        yield Document(f"help/{name}", text)


def unique(documents: Iterator[Document]) -> Iterator[Document]:
    """Drop documents with the text of an earlier one."""
    seen: set[str] = set()
    for document in documents:
        if document.text not in seen:
            seen.add(document.text)
            yield document


def write_corpus(folder: Path, library: Path) -> dict[str, tuple[int, int]]:
    """Write both files atomically.

    Returns:
        Part -> number of documents, and bytes of text.

    Raises:
        UserError: if the library's folder has too few sources.
    """
    documents = list(unique(iter([*library_documents(library), *help_documents()])))
    parts = {
        "train": [d for d in documents if not d.is_heldout],
        "heldout": [d for d in documents if d.is_heldout],
    }
    sizes: dict[str, tuple[int, int]] = {}
    for part, members in parts.items():
        if not members:
            raise UserError(f"{library}: no Python sources for the {part} text; give another --library")
        with atomic_write(folder / f"{part}.jsonl") as stream:
            for document in members:
                record = json.dumps({"name": document.name, "text": document.text}, ensure_ascii=False)
                stream.write(record.encode() + b"\n")
        sizes[part] = (len(members), sum(len(d.text.encode()) for d in members))
    return sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--library", type=Path, default=Path(sysconfig.get_path("stdlib")), help="Python sources (standard library)"
    )
    args = parser.parse_args()
    try:
        sizes = write_corpus(args.output_dir, args.library)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for part, (count, size) in sizes.items():
        print(f"{args.output_dir / part}.jsonl: {count:,} documents, {size / 1e6:.2f} MB of text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
