"""The demo's prompts: three of each kind, from which a seed picks one."""

from __future__ import annotations

import random

PROMPTS: dict[str, tuple[str, str, str]] = {
    "chat": (
        "Good morning! I slept badly and have a long day ahead. What would help me to get through it?",
        "My neighbour practises the trumpet at night. How do I talk to her about it without a quarrel?",
        "I have one free afternoon in a city that I don't know. How should I spend it?",
    ),
    "question": (
        "Why is the sky blue during the day and red in the evening?",
        "What is the difference between a virus and a bacterium?",
        "How does a refrigerator make things cold?",
    ),
    "list": (
        "List ten animals that live in the sea, one per line, with a number before each.",
        "List the days of the week and write one thing to do on each of them.",
        "Give me a packing list for three days of hiking.",
    ),
    "rewrite": (
        "Correct the spelling in this text and give it back otherwise unchanged: The firts trane to the "
        "cost left at six in the mornig. Nobody was on it but a man with a dog, a basket of aples and a "
        "very old umbrela.",
        "Write this text again in the past tense: The gardener opens the gate, fills the can with water and"
        " waters the roses. Then she sits down under the pear tree, opens a book and reads until the sun "
        "goes down.",
        "Write this text again with the name Clara in place of Martin: Martin lives by the harbour. Every "
        "morning Martin buys bread, and every evening Martin feeds the gulls. The gulls know Martin well.",
    ),
    "extract": (
        "Here is an order: 3 boxes of blue paint, 12 brushes, 1 ladder of two metres, 40 metres of tape, 5 "
        "buckets. Write each item on a line of its own as: item - quantity.",
        "Names and phones: Ada Berg 555-0101, Tom Lind 555-0102, Eva Holm 555-0103, Jan Dahl 555-0104. "
        "Write them as a Markdown table with the columns Name and Phone.",
        "Find all dates in this text and list them: The mill was built on 3 May 1871, burnt down on 12 "
        "August 1902, was rebuilt by 1 March 1905 and has been a museum since 20 June 1988.",
    ),
    "code": (
        "Write a Python function that returns the first n Fibonacci numbers as a list, with a docstring.",
        "Add type hints to this function and give it back:\n\ndef area(width, height):\n    if width < 0 or "
        "height < 0:\n        raise ValueError('width and height must not be negative')\n    return width * "
        "height",
        "Write a Python class Stack with the methods push, pop, peek and is_empty.",
    ),
    "story": (
        "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
        "Write the beginning of a fairy tale about a fox who wants to learn to read.",
        "Tell a short story in which a clock stops at exactly the right moment.",
    ),
    "reasoning": (
        "A baker makes 24 rolls an hour and works for 5 hours. He sells 95 rolls. How many are left? Think "
        "step by step.",
        "Anna is older than Ben. Ben is older than Carl. Dora is younger than Carl. Who is the youngest, and why?",
        "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Explain each step.",
    ),
}


def choose_prompts(seed: int) -> dict[str, str]:
    """One prompt of each kind; seed 0 gives the first ones."""
    if seed == 0:
        return {kind: variants[0] for kind, variants in PROMPTS.items()}
    pick = random.Random(seed)
    return {kind: pick.choice(variants) for kind, variants in PROMPTS.items()}
