"""The command line of a settings class: its parser with help, and messages that name options.

A verb is a frozen dataclass with a docstring, which is its help page, and a method `run`. Fields with an `Option` are
options, fields with a `Group` are settings classes whose options are shown together:

    @dataclass(frozen=True, kw_only=True)
    class Count(StoreVerb):
        \"\"\"count the tokens of a corpus

            headscan count texts/ --limit 500
        \"\"\"

        limit: Annotated[int, Option("number of texts", least=1)] = 500
        tokens: Annotated[TokenConfig, Group("sequences")]

        def run(self) -> Result: ...

A class attribute `common` names the options of the short help page; `--help all` shows all of them. Each option can
stand in a file, too (`--config-file`). `headscan.cli.main` lists the verbs.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Sequence
from dataclasses import MISSING
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from headscan.errors import HeadscanError
from headscan.options import Option
from headscan.settings.option_values import UsageError, file_values, make_settings, option_value, options_of

S = TypeVar("S")
#: Options by their earlier names.
_RENAMED = {
    "--config": "--config-file for a file of options, and --corpus-config for a hub data set",
    "--safe-loss": "--max-loss",
    "--step-tokens": "--batch-tokens",
}


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError`, so that each error is one line, and reads no shortened option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        if unknown := re.match("unrecognized arguments: (--[a-z-]+)", message):
            near = get_close_matches(unknown[1], self._option_string_actions, 1)
            message += f"; did you mean {near[0]}?" if near else ""
            if unknown[1] in _RENAMED:
                message = f"{unknown[1]} is now {_RENAMED[unknown[1]]}"
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Leave choices to `option_value`, which proposes the nearest."""


class VerbParser(Parser):
    """The parser of a verb, which gives the words of each option by its key."""

    def __init__(self, cls: Any, **settings: Any) -> None:
        # A docstring without its sections for Python.
        text = re.split(r"\n\n(?=Attributes:|Raises:)", inspect.getdoc(cls) or "")[0]
        super().__init__(**settings, description=text, add_help=False, argument_default=argparse.SUPPRESS)
        self.common = getattr(cls, "common", "").split()
        which = "the usual options; `--help all`: all options" if self.common else "all options"
        self.add_argument("-h", "--help", action=_Help, nargs="?", choices=["all"], metavar="all", help=which)
        which = "YAML or JSON file of options, as in `share: 0.1`; those of the command line replace them"
        self.add_argument("--config-file", metavar="FILE", help=which)
        groups: dict[str, Any] = {"": self}
        needed = [self.prog]
        for key, option in options_of(cls).items():
            if option.group not in groups:
                groups[option.group] = self.add_argument_group(option.group)
            shown = _shown(option)
            if option.flags[0].startswith("--"):
                groups[option.group].add_argument(*option.flags, dest=key, **shown)
            else:
                groups[option.group].add_argument(key, **shown | {"nargs": "*" if option.spaces else "?"})
            if option.is_required:
                needed += [option.flags[-1]] * option.flags[-1].startswith("--") + [shown["metavar"]]
        self.usage = " ".join([*needed, "[options]"])


class _Help(argparse.Action):
    """The option --help, which prints the common options of a verb, or all of them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if parser.common and values != "all":
            shown = {"--help", *parser.common}
            hidden = [each for each in parser._actions if shown.isdisjoint(each.option_strings or [each.metavar])]
            for action in hidden:
                action.help = argparse.SUPPRESS
            parser.epilog = f"`{parser.prog} --help all` shows {len(hidden)} more options."
        parser.print_help()
        parser.exit()


def _shown(option: Option) -> dict[str, Any]:
    """Return the arguments of `add_argument`, with the default in the help line."""
    field, default = option.field, option.default
    text = option.help.replace("%", "%%")
    nothing = default is MISSING or default is None or default is False or default == ()  # 0 is a default to show
    if not ("(default" in text or nothing or option.negated):
        values = default if isinstance(default, tuple) else ("yes" if default is True else default,)
        text += f" (default: {','.join(f'{each:g}' if isinstance(each, float) else str(each) for each in values)})"
    if field.kind is bool:
        on = "store_false" if option.negated else "store_true" if default is False else argparse.BooleanOptionalAction
        return {"help": text, "action": on}
    choices = () if field.many or option.kind else tuple(option.names or field.choices)
    is_number = field.kind is not str and option.parse is None
    usual = "N" if is_number else option.flags[0].strip("-").replace("-", "_").upper()
    return {
        "help": text,
        "metavar": option.metavar or (f"{{{','.join(choices)}}}" if choices else usual),
        "choices": choices or None,
        "nargs": "+" if option.spaces else None,
        "action": "append" if option.repeated and not option.spaces else "store",
    }


def read_settings(verb: str, cls: type[S], words: Sequence[str]) -> S:
    """Return the settings of a command line and of the file that it names with --config-file, or raise UsageError."""
    options = options_of(cls)
    given = vars(VerbParser(cls, prog=f"headscan {verb}").parse_intermixed_args(words))
    try:
        preset = file_values(cls, given.pop("config_file")) if "config_file" in given else {}
        chosen = {options[key].one_of for key in given} - {None}
        values = {key: value for key, value in preset.items() if options[key].one_of not in chosen}
        return make_settings(cls, values | {key: _value(options[key], word) for key, word in given.items()})
    except HeadscanError as problem:
        raise UsageError(with_flags(str(problem), cls)) from problem


def _value(option: Option, given: Any) -> Any:
    try:
        return option_value(option, ",".join(given) if option.spaces and not option.repeated else given)
    except HeadscanError as problem:
        raise UsageError(f"{option.flags[0]}: {problem}") from None


def with_flags(message: str, cls: type) -> str:
    """Return a message of the library with the options of a verb instead of the names of fields in backticks.

    ``replicas`` in backticks becomes ``--replicas``, ``replicas=3`` becomes ``--replicas 3``, and ``confirm=True`` and
    ``confirm=False`` become ``--confirm`` and ``--no-confirm``. A positional argument has its name of the usage line,
    such as ``MODEL``. All other words, such as paths, stay as they are.
    """
    options = options_of(cls).values()
    flags = {option.path[-1]: option for option in options}
    flags |= {option.flags[0].lstrip("-").replace("-", "_").lower(): option for option in options}

    def flag(marked: re.Match[str]) -> str:
        name, value = marked.groups()
        if name not in flags:
            return marked[0]
        shown = flags[name].flags[0]
        if value is None or value == "True" or (value == "False" and flags[name].negated):
            return shown
        return f"--no-{shown[2:]}" if value == "False" else f"{shown} {value}"

    return re.sub(r"`([a-z_]+)(?:=([^`]*))?`", flag, message)
