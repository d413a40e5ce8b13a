"""Documents each second on one core: tools/preprocess_data.py against a plain loop over `tokenizers`.

Both read the same JSON lines, make the same GPT-2 byte-level BPE ids and write the same .bin/.idx. The loop
encodes one document at a time with the `tokenizers` library. The text is the Python standard library's
sources, and with --vocab-file and --merge-file any GPT-2 vocabulary; without, one is trained on that text.
--input brings other text.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.turns import in_turns, timed
from megatron.config.tokenizer import TokenizerConfig
from megatron.data.indexed import IndexedDataset, IndexedWriter, best_dtype
from megatron.data.preprocess.encoding import EncodeOptions
from megatron.data.preprocess.pipeline import EncodingJob, run
from megatron.data.preprocess.reading import InputRange


def write_corpus(path: Path) -> None:
    """Writes the standard library's sources as JSON lines, in documents of 2,000 characters."""
    with open(path, "w", encoding="utf-8") as stream:
        for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            if "site-packages" in file.parts or "test" in file.parts or "idlelib" in file.parts:
                continue
            text = file.read_text(encoding="utf-8", errors="ignore")
            for start in range(0, len(text), 2000):
                stream.write(json.dumps({"text": text[start : start + 2000]}) + "\n")


def train_vocabulary(corpus: Path, folder: Path) -> tuple[Path, Path]:
    """Trains a byte-level BPE of 8,192 entries, in GPT-2's files."""
    from tokenizers import ByteLevelBPETokenizer

    texts = (json.loads(line)["text"] for line in open(corpus, encoding="utf-8"))  # noqa: SIM115
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=8192, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(folder))
    return folder / "vocab.json", folder / "merges.txt"


def plain_loop(corpus: Path, vocab_file: Path, merge_file: Path, prefix: Path) -> None:
    """Encodes one document at a time, which is the baseline."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer(str(vocab_file), str(merge_file))
    eod = tokenizer.token_to_id("<|endoftext|>")
    with (
        open(corpus, encoding="utf-8") as lines,
        IndexedWriter(prefix, dtype=best_dtype(tokenizer.get_vocab_size())) as writer,
    ):
        for line in lines:
            ids = tokenizer.encode(json.loads(line)["text"]).ids
            if ids:
                ids.append(eod)
            writer.add_document(ids)


def pipeline(corpus: Path, vocab_file: Path, merge_file: Path, prefix: Path) -> None:
    """Runs the tool with one worker."""
    options = EncodeOptions(
        json_keys=("text",),
        tokenizer=TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab_file), merge_file=str(merge_file)
        ),
        append_eod=True,
        split_sentences=False,
        keep_newlines=False,
        lang="english",
    )
    job = EncodingJob(options, "mmap", False, 1)
    run(job, [InputRange(str(corpus))], [str(prefix)], lambda totals, messages: None)


def main() -> None:
    """Prints docs/s and MB/s of both, their ratio, and whether the files are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", help="JSON lines with a `text` key")
    parser.add_argument("--vocab-file")
    parser.add_argument("--merge-file")
    parser.add_argument("--repeats", type=int, default=3, help="the best of this many counts (default: 3)")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = Path(args.input) if args.input else folder / "corpus.jsonl"
        if not args.input:
            write_corpus(corpus)
        if args.vocab_file:
            files = Path(args.vocab_file), Path(args.merge_file)
        else:
            files = train_vocabulary(corpus, folder)
        megabytes = corpus.stat().st_size / 1e6
        ways = {"loop": plain_loop, "tool": pipeline}
        sides = (partial(timed, partial(way, corpus, *files, folder / label)) for label, way in ways.items())
        turns = in_turns(*sides, turns=args.repeats)
        documents = IndexedDataset(folder / "tool").num_documents
        for side, label in enumerate(ways):
            seconds = turns.best(side)
            print(f"{label}: {documents / seconds:9.1f} docs/s {megabytes / seconds:7.2f} MB/s")
        same = all(
            (folder / f"loop.{end}").read_bytes() == (folder / f"tool.{end}").read_bytes() for end in ("bin", "idx")
        )
        print(f"ratio: {turns.best(0) / turns.best(1):.2f}; files equal: {same}")


if __name__ == "__main__":
    main()
