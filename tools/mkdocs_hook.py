"""The hook of mkdocs.yml: a line `::cli weightonly` or `::cli weightonly.bench` becomes tables of its commands."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # mkdocs runs the hook without the checkout


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return re.sub(r"^::cli (\S+)$", lambda line: "\n".join(sections(line[1])), markdown, flags=re.MULTILINE)


def sections(program: str) -> Iterator[str]:
    """For each command what it does, and a table of its arguments, in the words of its own help."""
    commands = argparse.ArgumentParser(prog=program).add_subparsers()
    if program == "weightonly":
        from weightonly.commands import COMMANDS

        for add in COMMANDS:
            add(commands)
    else:
        from weightonly.bench.__main__ import COMMANDS as BENCH

        for name, command in BENCH.items():
            command.add_options(commands.add_parser(name, help=command.help))
    for listed in commands._choices_actions:
        parser = commands.choices[listed.dest]
        words = parser._get_formatter()
        yield f"### {parser.prog}\n\n{cell(sentence(str(listed.help)))}.\n"
        if parser.description not in (None, listed.help):
            yield f"{cell(str(parser.description))}\n"
        actions = parser._actions[1:]  # the first is --help
        if actions:
            yield "| argument | meaning |\n|---|---|"
        for action in actions:
            meaning = cell(words._expand_help(action) if action.help else "")
            required = "required: " if action.option_strings and action.required else ""
            yield f"| `{words._format_action_invocation(action)}` | {required}{meaning} |"
        yield ""


def cell(text: str) -> str:
    """Text that Markdown leaves as it is, and that phones can break after commas."""
    return re.sub(r",(?=\S)", ",<wbr>", re.sub(r"([\\`*_<|\[])", r"\\\1", text))


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]
