"""Words that a reader stumbles over, with their replacements, and where a text has them.

Code, formulas and link targets are left out; `test_docs.py` holds the pages to this list.
"""

import re

# what to look for -> what to write
REPLACEMENTS = {
    r"tell|tells|telling|told": "shows, states, predicts, reveals; of a person: is informed",
    r"(?:is|are|be|was) none": "is not one; does not exist",
    r"(?<!there )(?:is|are|be) no(?! better| longer| more| less| one)": "is not a; has no",
    r"(?<!stays )(?<!% )behind": "after",
    r"spelled|spelling|spells": "specified, written",
    r"lie|lies|lay|lying": "is stored in, is in",
    r"nobody": "no client, no one",
    r"(?:go|goes|going|went|gone) on": "continues, resumes",
    r"(?:a|one) sentence": "an error message",
    r"by the same words": "with the same messages",
    r"in (?:the )?place of": "instead of",
    r"without a word": "silently",
    r"found out": "detected",
    r"(?:says?|said) so": "states it, prints it",
    r"(?:is|are|be) said": "is printed, is written",
    r"has to|have to": "must",
    r"besides": "also, in addition to",
    r"shall": "must, should",
    r"perhaps": "optionally, possibly",
    r"stands? for": "means",
    r"leans? on": "depends on",
    r"anew": "again",
    r"in vain": "without success",
}
# A sentence begins with its subject, not with "Of X, ...".
FRONTED = r"(?:^|[.;:] |\n- |\| )Of (?:a|an|the|all|what|those|several|many|one|ours)\b"


def prose(text: str) -> str:
    """Returns a page's text with code, formulas and link targets blanked, line by line."""
    for pattern in (r"^```.*?^```", r"\$\$.*?\$\$", r"`[^`\n]+`", r"\$[^$\n]+\$", r"\]\([^)\s]*\)"):
        text = re.sub(pattern, _blank, text, flags=re.DOTALL | re.MULTILINE)
    return text


def stumbling(text: str) -> list[str]:
    """Returns a line for each word of the list that the prose of a page contains."""
    lines = []
    text = prose(text)
    for pattern, instead in REPLACEMENTS.items():
        for found in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE):
            lines.append(f"{_place(text, found)}: {found[0]!r}: write {instead}")
    for found in re.finditer(FRONTED, text, re.MULTILINE):
        lines.append(f"{_place(text, found)}: {found[0]!r}: begin with the subject")
    return lines


def _blank(found: re.Match) -> str:
    """A match as blanks, with its line breaks."""
    return re.sub(r"[^\n]", "\u00b7", found[0])


def _place(text: str, found: re.Match) -> str:
    """The line of a match and the words around it."""
    around = text[max(0, found.start() - 50) : found.end() + 50].replace("\n", " ")
    return f"line {text.count(chr(10), 0, found.start()) + 1} ({around})"
