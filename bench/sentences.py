"""160 sentences for a sentence encoder: 16 subjects x 10 predicates, each with one of 11 ends."""

from __future__ import annotations

SUBJECTS = (
    "The old fisherman",
    "A young engineer",
    "My neighbour's dog",
    "The central bank",
    "Our history teacher",
    "The night train",
    "A group of tourists",
    "The new vaccine",
    "Her younger brother",
    "The city council",
    "An orchestra from Vienna",
    "The password form",
    "A small bakery",
    "The space probe",
    "Heavy rain",
    "This compiler",
)
PREDICATES = (
    "surprised everyone",
    "made the evening news",
    "was late again",
    "cost more than expected",
    "found a better way",
    "stopped without warning",
    "changed the plan",
    "is easy to understand",
    "caused a long discussion",
    "won the first prize",
)
ENDS = (
    "on Monday morning",
    "during the winter holidays",
    "because of the storm",
    "after three years of work",
    "in front of the old library",
    "despite the low price",
    "for the second time",
    "while the match was on TV",
    "according to the manual",
    "when interest rates rose",
    "near the harbour",
)

SENTENCES = [
    f"{subject} {predicate} {ENDS[(3 * i + j) % len(ENDS)]}."
    for i, subject in enumerate(SUBJECTS)
    for j, predicate in enumerate(PREDICATES)
]
