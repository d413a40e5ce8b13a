"""Command line: an argparse parser generated from sections, and the parser of training runs."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn

from megatron.base.documents import read_yaml
from megatron.base.errors import ErrorList, UserError
from megatron.base.fields import check_fields, check_required
from megatron.base.option import FieldOption
from megatron.base.words import spell
from megatron.config.collect import FlagTable, Source, Target, collect_yaml
from megatron.config.kinds import PROGRAMS, ModelType
from megatron.config.run import RunConfig, notes_without_effect, run_sections
from megatron.config.translate import TRANSLATOR
from megatron.config.translate.rules import SWITCH, VALUE, VALUES, Explicit, OldFlag, Translator

_EPILOG = (
    "Hyphens and underscores are alike in flag names, integers may contain underscores, and a switch may be "
    "given a value (--swiglu false). Flags win over --config, which wins over defaults. Flags of Megatron "
    "that are accepted without effect, or refused, are listed in docs/flags.md."
)


@dataclass(kw_only=True)
class ParsedSections:
    """Sections parsed from a command line.

    sections: section name -> dataclass instance.
    notes: lines to show the user once (flags without effect, old names).
    explicit: dotted names (`section.field`) of the fields set by flags or the YAML file.
    """

    sections: dict[str, Any]
    notes: list[str]
    explicit: set[str]


@dataclass(kw_only=True)
class ParsedRun:
    """Parsed command line of a training run: its unresolved configuration and notes."""

    config: RunConfig
    notes: list[str]
    explicit: set[str]

    def resolve(self, world_size: int, *, cuda_available: bool = False) -> RunConfig:
        """Resolve the configuration; automatic choices and settings without effect are added to `notes`."""
        resolved = self.config.resolve(world_size, cuda_available=cuda_available, notes=self.notes)
        self.notes += notes_without_effect(self.config, resolved, self.explicit, world_size)
        return resolved


_BACKSLASH = "a word that is only a backslash is left out; nothing may follow the one that ends a line"

_GENERAL = tuple(map(spell, ("config", "help", "list-compressors")))
"""Flags outside of the configuration."""


class FlagParser:
    """Parser of flags and `--config` files into section instances."""

    def __init__(self, table: FlagTable, prog: str, description: str) -> None:
        self.table = table
        self._argparse = _build_argparse(table, prog, description)

    def parse(self, argv: Sequence[str], *, check: bool = True) -> ParsedSections:
        """Parse a command line, without the program name.

        With `check`, required fields must be given and each field must be within its bounds. Raises a single
        UserError that names everything unknown or refused; prints and exits for --help.
        """
        errors = ErrorList()
        words = [word for word in argv if word != "\\"]
        namespace = argparse.Namespace(events=[], config=[])
        with errors.collect():
            self._argparse.parse_args(self._normalize(words, errors), namespace=namespace)
        flags = Source(self.table)
        if len(words) != len(argv):
            flags.notes.append(_BACKSLASH)
        for target, spelling, texts in namespace.events:
            with errors.collect():
                flags.flag(target, spelling, texts)
        sources = [flags]
        if len(namespace.config) > 1:
            raise UserError(f"--config is given {len(namespace.config)} times; put everything in one file")
        for path in namespace.config:
            sources.insert(0, collect_yaml(self.table, read_yaml(path), path, errors))
        errors.raise_all()
        parsed = self._merge(sources)
        if check:
            for name, values in parsed.sections.items():
                check_required(name, values)
                check_fields(name, values)
        return parsed

    def format_help(self) -> str:
        """Text of --help."""
        return self._argparse.format_help()

    def _normalize(self, argv: Sequence[str], errors: ErrorList) -> list[str]:
        """Rewrite every flag to its canonical spelling for argparse. Unknown flags and their arguments are dropped and
        added to `errors`."""
        words: list[str] = []
        is_known = True
        for word in argv:
            if not word.startswith("--"):
                words += [word] if is_known else []
                continue
            name, equals, value = word.partition("=")
            is_known = spell(name) in _GENERAL or self.table.by_flag(name) is not None
            if is_known and value == "--":
                errors.messages.append(f"{name} --: give a value")
            elif is_known:
                words.append(f"--{spell(name)}{equals}{value}")
            else:
                errors.messages.append(f"unknown flag {name}{self.table.nearest_flag(name)}; --help lists all flags")
        return words

    def _merge(self, sources: list[Source]) -> ParsedSections:
        explicit = Explicit()
        notes: list[str] = []
        for level, source in enumerate(sources):
            explicit.add(source.values, level)
            notes += [note for note in source.notes if note not in notes]
        rules = [rule for source in sources for rule in source.rules]
        self.table.translator.translate(explicit, rules, notes.append)
        sections = {
            section: cls(**{path.partition(".")[2]: explicit[path] for path in explicit if _in(path, section)})
            for section, cls in self.table.own.items()
        }
        return ParsedSections(sections=sections, notes=notes, explicit=set(explicit))


def _in(path: str, section: str) -> bool:
    return path.partition(".")[0] == section


def build_parser(sections: dict[str, type], prog: str, description: str, *, old: Sequence[OldFlag] = ()) -> FlagParser:
    """Build the parser of a program: a group of flags for each section (name -> dataclass of `option` fields)."""
    return FlagParser(FlagTable(sections, Translator(flags=tuple(old))), prog, description)


def run_table() -> FlagTable:
    """Flag table of training runs."""
    return FlagTable(run_sections(), TRANSLATOR)


@cache
def build_run_parser(prog: str = PROGRAMS["gpt"], model_type: ModelType = "gpt") -> FlagParser:
    """Parser of training runs. Parsing does not modify it."""
    description = f"Pretrain a {model_type.upper()} with tensor, pipeline and data parallelism."
    return FlagParser(run_table(), prog, description)


def parse_args(argv: Sequence[str], *, prog: str = PROGRAMS["gpt"]) -> ParsedRun:
    """Parse the command line of a training run, without the program name; `RunConfig.resolve` completes it.

    Raises a one-line UserError; prints and exits for --help. Values are not checked yet, so that those of a checkpoint
    can be merged first.
    """
    return read_run(build_run_parser(prog), argv)


def parse_program(argv: Sequence[str], model_type: ModelType) -> ParsedRun:
    """`parse_args` for a program that trains one kind of model. Raises UserError if the flags ask for another kind."""
    prog = PROGRAMS[model_type]
    parsed = read_run(build_run_parser(prog, model_type), argv)
    model = parsed.config.model
    if "model.model_type" in parsed.explicit and model.model_type != model_type:
        raise UserError(
            f"--model-type {model.model_type}: {prog} trains {model_type.upper()}; run {PROGRAMS[model.model_type]}"
        )
    if not model.predicts_words:
        raise UserError(f"--task-head {model.task_head}: {prog} trains language models; run tasks/main.py")
    parsed.config = replace(parsed.config, model=replace(model, model_type=model_type))
    return parsed


def read_run(parser: FlagParser, argv: Sequence[str]) -> ParsedRun:
    """`parse_args` with an existing parser."""
    parsed = parser.parse(argv, check=False)
    return ParsedRun(config=RunConfig(**parsed.sections), notes=parsed.notes, explicit=parsed.explicit)


_NARGS = {SWITCH: "?", VALUE: None, VALUES: "*"}


def _build_argparse(table: FlagTable, prog: str, description: str) -> argparse.ArgumentParser:
    parser = _OneLineErrors(
        prog=prog,
        usage=f"{prog} [--config FILE.yaml] [flags]",
        description=description,
        epilog=_EPILOG,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    general = parser.add_argument_group("general")
    general.add_argument("--help", "-h", action="help", help="Show this text and exit.")
    general.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="YAML file with the same names; flags win over it.",
    )
    if "compression" in table.sections:
        general.add_argument(
            "--list-compressors",
            "--list_compressors",
            action=_ListCompressors,
            nargs=0,
            help="Print the communication points, the compressors and their options, and exit.",
        )
    for section, cls in table.sections.items():
        group = parser.add_argument_group(section, _first_line(cls))
        for described in table.fields.values():
            if described.section == section:
                _add_field(group, described)
    documented_flags = [old for old in table.translator.flags if old.help]
    if documented_flags:
        group = parser.add_argument_group("shorthand and old names")
        for old in documented_flags:
            _add(group, (old.name,), old, _NARGS[old.arity], "VALUE", old.help)
    for old in table.translator.flags:
        if not old.help:
            _add(parser, (old.name,), old, _NARGS[old.arity], "VALUE", argparse.SUPPRESS)
    return parser


def _add_field(group: argparse._ArgumentGroup, described: FieldOption) -> None:
    nargs: int | str | None = None
    if described.is_switch:
        nargs = "?"
    elif described.is_list and not described.option.repeatable:
        nargs = described.option.count or "+"
    text = f"{described.option.help} {help_details(described)}".strip()
    _add(group, described.flags, described, nargs, metavar_of(described), text)


def _add(
    container: argparse._ActionsContainer,
    flags: Sequence[str],
    target: Target,
    nargs: int | str | None,
    metavar: str,
    help: str,
) -> None:
    spellings = [f"--{flags[0]}", *(f"--{spell(flag)}" for flag in flags)]
    container.add_argument(
        *dict.fromkeys(spellings),
        action=_Record,
        dest="events",
        default=argparse.SUPPRESS,
        target=target,
        nargs=nargs,
        metavar=metavar,
        help=help.replace("%", "%%"),
    )


class _Record(argparse.Action):
    """Action that appends (target, spelling, words) to the event list of the namespace."""

    def __init__(self, *args: Any, target: Target, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.target = target

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        texts = [] if values is None else [values] if isinstance(values, str) else list(values)
        namespace.events.append((self.target, option_string, texts))


class _ListCompressors(argparse.Action):
    """Action that prints the values of --compress, including earlier --compress-module files, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        from megatron.compression.listing import describe
        from megatron.compression.plugins import build_registry

        files = [
            text for _, flag, texts in namespace.events if spell(flag) == spell("compress-module") for text in texts
        ]
        parser.exit(message=describe(build_registry(files)) + "\n")


class _OneLineErrors(argparse.ArgumentParser):
    """Argument parser that raises UserError instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        match = re.fullmatch(r"argument (--[^/:\s]+)[^:]*: (.*)", message, flags=re.DOTALL)
        raise UserError(f"{match[1]}: {match[2]}" if match else f"{message}; --help lists all flags")


class _HelpFormatter(argparse.HelpFormatter):
    """Help formatter that shows only the canonical spelling of a flag, and no value for switches."""

    def __init__(self, prog: str) -> None:
        width = max(60, min(shutil.get_terminal_size().columns, 110))
        super().__init__(prog, max_help_position=34, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # Multi-line text is already formatted.
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        # Do not break flags at hyphens.
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or not isinstance(action, _Record):
            return super()._format_action_invocation(action)
        if action.nargs == "?":
            return action.option_strings[0]
        return f"{action.option_strings[0]} {action.metavar}"


def metavar_of(described: FieldOption) -> str:
    """Placeholder for the value of a flag in the help text; empty for a switch."""
    if described.is_switch:
        return ""
    if described.option.metavar:
        return described.option.metavar
    if described.choices and len("|".join(described.choices)) <= 45:
        return "|".join(described.choices)
    return {int: "N", float: "X"}.get(described.element, "TEXT")


def help_details(described: FieldOption) -> str:
    """Bracketed details after the help of a flag: choices, unit, default, aliases."""
    details = []
    option = described.option
    if described.choices and len("|".join(described.choices)) > 45:
        details.append(f"one of {', '.join(described.choices)}")
    if option.unit:
        details.append(option.unit)
    default = default_text(described)
    if default:
        details.append(default if default == "required" else f"default: {default}")
    if option.aliases:
        details.append("also " + ", ".join(f"--{alias}" for alias in option.aliases))
    return f"({'; '.join(details)})" if details else ""


def default_text(described: FieldOption) -> str:
    """Default value in the help text; empty for a switch that is off by default."""
    if described.is_switch:
        return described.option.when_unset
    if described.option.required:
        return "required"
    if described.option.when_unset:
        return described.option.when_unset
    if described.is_list:
        return " ".join(map(str, described.default)) or "none"
    return number_text(described.default)


def number_text(value: Any) -> str:
    """Short text of a default value: 2**32, 1e-05, 0.1; strings unchanged."""
    if isinstance(value, float) and value >= 2**16 and value.is_integer():
        integer = int(value)
        if integer & (integer - 1) == 0:
            return f"2**{integer.bit_length() - 1}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]
