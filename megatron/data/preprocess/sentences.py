"""Sentence splitting with nltk's Punkt models if installed, otherwise by rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

Spans = list[tuple[int, int]]

# Abbreviations with a period that does not end a sentence; in lower case, without the period.
_ABBREVIATIONS = """
mr mrs ms mx dr prof sr jr st mt ft gen col maj capt cmdr lt sgt cpl adm rev hon pres gov sen rep supt
no nos nr fig figs eq eqs sec secs ch chap vol vols pp pg art ed eds trans vs v cf ca approx al ibid viz
jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thur thurs fri sat
inc ltd co corp dept univ assn bros ave blvd rd est bzw usw vgl hrsg bd mme mlle sra sig dott
"""
_ABBREVIATION_SET = frozenset(_ABBREVIATIONS.split())
_WIDE = "\u3002\uff01\uff1f"  # Chinese and Japanese sentence ends, without a following space
_CLOSING, _WIDE_CLOSING = r"\"'\u201d\u2019\u00bb)\]", r"\u300d\u300f\u201d\u2019\uff09"
# Possible sentence ends, with closing quotes and brackets; an empty line always ends a sentence.
_END = re.compile(rf"(?<![.!?\u2026])[.!?\u2026]+[{_CLOSING}]*(?=\s)|[{_WIDE}]+[{_WIDE_CLOSING}]*|\n[^\S\n]*\n\s*")
_LAST_WORD = re.compile(r"[^\s(\[\"'\u201c\u2018\u00ab]+$")
_DOTTED = re.compile(r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,2}")
_BEFORE_WORD = re.compile(r"\s*[\"'\u201c\u2018\u00ab(\[{\-\u2013\u2014*_\u00bf\u00a1]*")
_MAX_WORD = 40


def load_punkt(lang: str) -> Any:
    """Load nltk's Punkt model of a language from local folders (NLTK_DATA and nltk's defaults), or return None.

    Nothing is downloaded.
    """
    try:
        from nltk.tokenize import punkt

        return punkt.PunktTokenizer(lang)
    except (ImportError, LookupError, AttributeError, OSError, ValueError):
        return None


def rule_spans(text: str) -> Spans:
    """Split a text by rules, for languages that end sentences with . ! ? or their Chinese and Japanese forms.

    A sentence does not end before a lower-case word, nor after an abbreviation, an initial or letters separated by
    periods (e.g., U.S.). Spans exclude the white space around sentences.
    """
    spans: Spans = []
    begin = 0
    for match in _END.finditer(text):
        sign = match[0]
        if not sign.isspace() and sign[0] not in _WIDE:
            opening = _BEFORE_WORD.match(text, match.end())
            word_start = match.end() if opening is None else opening.end()
            if text[word_start : word_start + 1].islower():
                continue
            if sign.startswith(".") and not sign.startswith(".."):
                word = _LAST_WORD.search(text, max(begin, match.start() - _MAX_WORD), match.start())
                name = "" if word is None else word[0]
                is_initial = len(name) == 1 and name.isupper()
                if _DOTTED.fullmatch(name) or name.lower() in _ABBREVIATION_SET or is_initial:
                    continue
        _append_stripped(spans, text, begin, match.end())
        begin = match.end()
    _append_stripped(spans, text, begin, len(text))
    return spans


def _append_stripped(spans: Spans, text: str, begin: int, end: int) -> None:
    while begin < end and text[begin].isspace():
        begin += 1
    while begin < end and text[end - 1].isspace():
        end -= 1
    if begin < end:
        spans.append((begin, end))


def sentence_splitter(lang: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    """Build a function that splits a text into sentences.

    With ``keep_newlines`` the white space between two sentences stays at the end of the first, so that the
    concatenated sentences are the text; otherwise it is dropped.
    """
    punkt = load_punkt(lang)

    def split(text: str) -> list[str]:
        spans = rule_spans(text) if punkt is None else list(punkt.span_tokenize(text))
        if not keep_newlines:
            return [text[start:end] for start, end in spans]
        starts = [0, *(start for start, _ in spans[1:]), len(text)]
        return [text[start:end] for start, end in pairwise(starts) if end > start]

    return split
