"""Short questions to a chat model, each with what a right answer has in it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
QUESTIONS = (
    ("What is the capital of France?", "Paris"),
    ("What is the capital of Japan?", "Tokyo"),
    ("What is the capital of Germany?", "Berlin"),
    ("What is the capital of Italy?", "Rome"),
    ("What is the capital of Spain?", "Madrid"),
    ("What is the capital of China?", "Beijing"),
    ("What is the capital of Russia?", "Moscow"),
    ("What is the capital of Egypt?", "Cairo"),
    ("What is the capital of Canada?", "Ottawa"),
    ("What is the capital of Australia?", "Canberra"),
    ("What is the capital of Greece?", "Athens"),
    ("What is the capital of Austria?", "Vienna"),
    ("What is the capital of Portugal?", "Lisbon"),
    ("What is the capital of India?", "Delhi"),
    ("What is the capital of England?", "London"),
    ("What is the capital of Brazil?", "Brasilia|Brasília"),
    ("How many days are in a week?", "seven|7"),
    ("How many months are in a year?", "12|twelve"),
    ("How many hours are in a day?", "24"),
    ("How many minutes are in an hour?", "60|sixty"),
    ("What is 2 + 2?", "4|four"),
    ("What is 3 + 5?", "8|eight"),
    ("What is 10 - 3?", "7|seven"),
    ("What colour is the sky?", "blue"),
    ("What colour is grass?", "green"),
    ("What colour is snow?", "white"),
    ("What is the largest planet?", "Jupiter"),
    ("What is the closest planet to the Sun?", "Mercury"),
    ("What star is at the centre of the solar system?", "Sun"),
    ("What gas do plants take in?", "carbon|CO2"),
    ("What gas do humans breathe in to live?", "oxygen"),
    ("What is H2O?", "water"),
    ("Who was the first president of the United States?", "Washington"),
    ("Who painted the Mona Lisa?", "Leonardo|Vinci"),
    ("What is the opposite of hot?", "cold|cool"),
    ("What is the opposite of up?", "down"),
    ("What is the opposite of big?", "small|little|tiny"),
    ("What language is spoken in Brazil?", "Portuguese"),
    ("What language is spoken in France?", "French"),
    ("What language is spoken in Germany?", "German"),
    ("How many legs does a spider have?", "eight|8"),
    ("How many legs does a dog have?", "four|4"),
    ("What is the largest ocean?", "Pacific"),
    ("What is the longest river in Africa?", "Nile"),
    ("What is the highest mountain on Earth?", "Everest"),
    ("What is the chemical symbol for gold?", "Au"),
    ("What is the chemical symbol for oxygen?", "O"),
    ("Who wrote Romeo and Juliet?", "Shakespeare"),
    ("Who wrote Hamlet?", "Shakespeare"),
    ("Who developed the theory of relativity?", "Einstein"),
    ("Who discovered gravity?", "Newton"),
    ("What is the speed of light?", "299|300|186|3 x 10|3.0"),
    ("What is the freezing point of water in Celsius?", "0|zero"),
    ("What is the boiling point of water in Celsius?", "100"),
    ("What animal says meow?", "cat"),
    ("What animal barks?", "dog"),
    ("What is a baby cat called?", "kitten"),
    ("What is a baby dog called?", "puppy|pup"),
    ("What do bees make?", "honey"),
    ("What do cows produce that we drink?", "milk"),
)
"""Regular expressions, any of which is right."""


class Asked(msgspec.Struct, frozen=True):
    """A prompt, and what is right."""

    prompt: str
    right: re.Pattern[str]


def asked(count: int) -> list[Asked]:
    """The first `count` questions, without a system message and with one."""
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [
        Asked(system + chat.format(text), re.compile(right)) for system in ("", SYSTEM) for text, right in QUESTIONS[:count]
    ]


def right(questions: Sequence[Asked], answers: Sequence[str]) -> int:
    """How many answers have in them what is right."""
    return sum(bool(question.right.search(answer)) for question, answer in zip(questions, answers, strict=True))
