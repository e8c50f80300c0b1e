"""What the suffix automaton and its users should find, by looking everywhere."""

from collections import Counter

from batchspec.drafting.suffix_automaton import SEPARATOR


def ends(text, run):
    """Places behind the occurrences of a run."""
    return [end for end in range(len(run), len(text) + 1) if text[end - len(run) : end] == run]


def repeated_suffix(text):
    """The longest suffix that also ends elsewhere."""
    return next(text[start:] for start in range(1, len(text) + 1) if len(ends(text, text[start:])) > 1)


def shared_suffix(text, other):
    """The longest suffix of `other` that occurs in `text`."""
    return next(other[start:] for start in range(len(other) + 1) if ends(text, other[start:]))


def followers(text, run):
    found = [text[end] for end in ends(text, run) if end < len(text)]
    return Counter(token for token in found if token != SEPARATOR)


def walk(text, run, limit):
    """Draft tokens with match length and share; of equally frequent followers the newest."""
    drafted, length = [], len(run)
    while len(drafted) < limit:
        if ends(text, run) == [len(text)]:
            run = repeated_suffix(text)
        counts = followers(text, run)
        if not counts:
            break
        newest = {text[end]: end for end in ends(text, run) if end < len(text)}
        token = max(counts, key=lambda token: (counts[token], newest[token]))
        drafted.append((token, length + len(drafted), counts[token] / counts.total()))
        run = [*run, token]
    return drafted
