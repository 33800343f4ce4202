"""Parts of messages: numbers with nouns, and suggestions for misspelled words.

counted(1, "rank")                      # "1 rank"
counted(8, "micro-batch")               # "8 micro-batches"
did_you_mean("trian", "train", "plan")  # " (did you mean train?)"
"""

from __future__ import annotations


def counted(count: float, noun: str, spec: str = "") -> str:
    """Returns a number with its noun in singular or plural, such as "1 rank" or "2 ranks".

    Args:
        count: number to write.
        noun: the noun in singular; its plural must be regular.
        spec: format of the number, such as "," for thousands.
    """
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        noun, ending = (noun, "") if count == 1 else (noun[:-1], "ies")
    return f"{count:{spec}} {noun}{'' if count == 1 else ending}"


def did_you_mean(word: str, *names: str) -> str:
    """Returns " (did you mean NAME?)" with the name closest to `word`, or "" if none is close."""
    import difflib  # imported here, so that `threed --help` starts fast

    close = difflib.get_close_matches(word, names, 1)
    return f" (did you mean {close[0]}?)" if close else ""
