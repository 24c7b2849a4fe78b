"""Words that a reader stumbles over, with their replacements, and where a text has them.

Code, formulas and link targets are left out. `test_docs.py` holds pages and sources to this list.
`python tests/support/words.py fedjax_bn/data` prints what the docstrings, comments and messages of
a folder have of it.
"""

import io
import re
import sys
import tokenize
from pathlib import Path

# what to look for -> what to write
REPLACEMENTS = {
    r"tell|tells|telling|told": "shows, states, predicts, reveals; of a person: is informed",
    r"(?:is|are|be|was) (?-i:none)": "is not one; does not exist",
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


def sentences(path: Path) -> str:
    """Returns a Python file with all but its docstrings, comments and messages blanked."""
    source = path.read_text()
    kept = [["\u00b7"] * len(line) for line in source.split("\n")]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        middle = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)
        texts = token.type in (tokenize.STRING, middle) and token.string.count(" ") > 2
        if texts or token.type == tokenize.COMMENT:
            lines = token.string.split("\n")
            for number, line in enumerate(lines):
                start = token.start[1] if number == 0 else 0
                kept[token.start[0] - 1 + number][start : start + len(line)] = line
    return "\n".join("".join(line) for line in kept)


def main(folders: list[str]) -> int:
    """Prints what the Python files of folders have of the list, and returns how many there are."""
    found = 0
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.py")):
        for line in stumbling(sentences(path)):
            print(f"{path}: {line}")
            found += 1
    return found


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
