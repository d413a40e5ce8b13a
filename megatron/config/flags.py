"""Command line: an argparse parser generated from sections, and the parser of training runs."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn

from megatron.base.documents import read_yaml
from megatron.base.errors import ErrorList, UserError
from megatron.base.fields import check_fields, missing_flags
from megatron.base.user_text import spell
from megatron.config.collect import FlagTable, Source, collect_yaml
from megatron.config.help import HelpFormatter, HelpGroup, add_target, all_groups, common_groups, selected_groups
from megatron.config.model_types import PROGRAMS, ModelType
from megatron.config.run import RunConfig, notes_without_effect, run_sections
from megatron.config.translate import build_translator
from megatron.config.translate.rules import ExplicitValues, OldFlag, Translator

_EPILOG = (
    "Hyphens and underscores are alike in flag names, integers may contain underscores, and a switch may be "
    "given a value (--swiglu false). Flags win over --config, which wins over defaults. Flags of Megatron "
    "that are accepted without effect, or refused, are listed in docs/reference/flags.md."
)


@dataclass(kw_only=True)
class ParsedSections:
    """Sections parsed from a command line.

    sections: section name -> dataclass instance.
    notes: lines to show the user once (flags without effect, old names).
    explicit: dotted names (`section.field`) of the fields set by flags or the YAML file.
    flag_fields: those set by flags.
    """

    sections: dict[str, Any]
    notes: list[str]
    explicit: set[str]
    flag_fields: set[str]


@dataclass(kw_only=True)
class ParsedRun:
    """Parsed command line of a training run: its unresolved configuration and notes."""

    config: RunConfig
    notes: list[str]
    explicit: set[str]
    flag_fields: set[str]

    @classmethod
    def of(cls, parsed: ParsedSections) -> ParsedRun:
        """Make a run of parsed sections, which are those of ``RunConfig``."""
        config = RunConfig(**parsed.sections)
        return cls(config=config, notes=parsed.notes, explicit=parsed.explicit, flag_fields=parsed.flag_fields)

    def resolve(self, world_size: int, *, cuda_available: bool = False) -> RunConfig:
        """Resolve the configuration; automatic choices and settings without effect are added to `notes`."""
        resolved = self.config.resolve(world_size, cuda_available=cuda_available, notes=self.notes)
        self.notes += notes_without_effect(self.config, resolved, self.explicit, world_size)
        return resolved


_BACKSLASH = "a lone backslash is ignored; at the end of a line, nothing may follow it, not even a space"

_GENERAL = tuple(map(spell, ("config", "help", "list-compressors")))
"""Flags outside of the configuration."""


class FlagParser:
    """Parser of flags and `--config` files into section instances.

    short_help: whether --help shows only the flags that most runs need (``Option.common``).
    """

    def __init__(self, table: FlagTable, prog: str, description: str, *, short_help: bool = False) -> None:
        self.table = table
        self._short_groups = common_groups(table) if short_help else []
        self._prog = prog
        self._description = description
        self._argparse = self._build_argparse(all_groups(table))
        for old in table.translator.flags:
            if not old.help:
                add_target(self._argparse, old, argparse.SUPPRESS)

    def parse(self, argv: Sequence[str], *, check: bool = True) -> ParsedSections:
        """Parse a command line, without the program name.

        With `check`, required fields must be given and each field must be within its bounds. Raises a single
        UserError that names everything unknown or refused; prints and exits for --help.
        """
        errors, flags = ErrorList(), Source(self.table)
        # For argparse, flags get their canonical spelling; unknown flags and their arguments are dropped.
        words: list[str] = []
        is_known = True
        for word in argv:
            if word == "\\":
                flags.notes = [_BACKSLASH]
                continue
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
                errors.messages.append(
                    f"unknown flag {name}{self.table.nearest_flag(name)}; --help all lists all flags"
                )
        namespace = argparse.Namespace(events=[], config=[])
        with errors.collect():
            self._argparse.parse_args(words, namespace=namespace)
        for target, spelling, texts in namespace.events:
            with errors.collect():
                flags.add_flag(target, spelling, texts)
        sources = [flags]
        if len(namespace.config) > 1:
            raise UserError(f"--config is given {len(namespace.config)} times; put everything in one file")
        for path in namespace.config:
            sources.insert(0, collect_yaml(self.table, read_yaml(path), path, errors))
        errors.raise_all()
        explicit = ExplicitValues()
        notes: list[str] = []
        for level, source in enumerate(sources):
            explicit.update(source.values)
            explicit.levels.update(dict.fromkeys(source.values, level))
            notes += [note for note in source.notes if note not in notes]
        rules = [rule for source in sources for rule in source.rules]
        self.table.translator.translate(explicit, rules, notes.append)
        sections = {
            section: cls(
                **{path.partition(".")[2]: explicit[path] for path in explicit if path.startswith(f"{section}.")}
            )
            for section, cls in self.table.own_sections.items()
        }
        parsed = ParsedSections(sections=sections, notes=notes, explicit=set(explicit), flag_fields=set(flags.values))
        if check:
            for name, values in parsed.sections.items():
                missing = missing_flags(name, values)
                if missing:
                    verb = "is" if len(missing) == 1 else "are"
                    raise UserError(f"{', '.join(missing)} {verb} required and {verb} not given")
                check_fields(name, values)
        return parsed

    def format_help(self, group: str = "") -> str:
        """Text of ``--help GROUP``: the flags of a group, of all groups, or those that most runs need.

        Raises:
            UserError: if no group has this name.
        """
        epilog = _EPILOG
        if self._short_groups and not group:
            names = ", ".join(section.name for section in all_groups(self.table))
            epilog = f"--help all shows every flag, and --help GROUP those of a group: {names}."
        groups = selected_groups(self.table, group, self._short_groups)
        return self._build_argparse(groups, epilog).format_help()

    def _build_argparse(self, groups: Sequence[HelpGroup], epilog: str = "") -> argparse.ArgumentParser:
        """Argparse parser of the flags of these groups and of those outside of the configuration."""
        parser = _RaisingParser(
            prog=self._prog,
            usage=f"{self._prog} [--config FILE.yaml] [flags]",
            description=self._description,
            epilog=epilog,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        general = parser.add_argument_group("general")
        general.add_argument(
            "--help",
            "-h",
            action=_PrintAction,
            nargs="?",
            text=lambda name, _: self.format_help(name),
            metavar="GROUP",
            help="Show the flags that most runs need, those of a group, or all of them (--help all), and exit."
            if self._short_groups
            else "Show all flags, or those of a group, and exit.",
        )
        general.add_argument(
            "--config",
            metavar="FILE",
            action="append",
            default=[],
            help="YAML file with the same names; flags win over it.",
        )
        if "compression" in self.table.sections:
            general.add_argument(
                "--list-compressors",
                "--list_compressors",
                action=_PrintAction,
                nargs="?",
                text=_list_compressors,
                metavar="NAME",
                help="Print the communication points and the compressors, or the options of a compressor, and exit.",
            )
        for group in groups:
            arguments = parser.add_argument_group(group.title, group.about)
            for target in group.targets:
                add_target(arguments, target)
        return parser


def build_parser(sections: dict[str, type], prog: str, description: str, *, old: Sequence[OldFlag] = ()) -> FlagParser:
    """Build the parser of a program: a group of flags for each section (name -> dataclass of `option` fields)."""
    return FlagParser(FlagTable(sections, Translator(flags=tuple(old))), prog, description)


def run_table() -> FlagTable:
    """Flag table of training runs."""
    return FlagTable(run_sections(), build_translator())


@cache
def build_run_parser(prog: str = PROGRAMS["gpt"], model_type: ModelType = "gpt") -> FlagParser:
    """Parser of training runs. Parsing does not modify it."""
    description = f"Pretrain a {model_type.upper()} with tensor, pipeline and data parallelism."
    return FlagParser(run_table(), prog, description, short_help=True)


def parse_args(argv: Sequence[str], *, prog: str = PROGRAMS["gpt"]) -> ParsedRun:
    """Parse the command line of a training run, without the program name; `RunConfig.resolve` completes it.

    Raises a one-line UserError; prints and exits for --help. Values are not checked yet, so that those of a checkpoint
    can be merged first.
    """
    return ParsedRun.of(build_run_parser(prog).parse(argv, check=False))


def parse_program(argv: Sequence[str], model_type: ModelType) -> ParsedRun:
    """`parse_args` for a program of a single model type. Raises UserError if the flags request another type."""
    prog = PROGRAMS[model_type]
    parsed = ParsedRun.of(build_run_parser(prog, model_type).parse(argv, check=False))
    model = parsed.config.model
    if "model.model_type" in parsed.explicit and model.model_type != model_type:
        raise UserError(
            f"--model-type {model.model_type}: {prog} trains {model_type.upper()}; run {PROGRAMS[model.model_type]}"
        )
    if not model.predicts_words:
        raise UserError(f"--task-head {model.task_head}: {prog} trains language models; run tasks/main.py")
    parsed.config = replace(parsed.config, model=replace(model, model_type=model_type))
    return parsed


class _PrintAction(argparse.Action):
    """Action that prints a text about the name after its flag, or a general text without a name, and exits.

    text: makes the text from the name and the flags before it.
    """

    def __init__(self, *args: Any, text: Callable[[str, argparse.Namespace], str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.text = text

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        sys.stdout.write(self.text(values or "", namespace))
        parser.exit()


def _list_compressors(name: str, namespace: argparse.Namespace) -> str:
    """Text of ``--list-compressors NAME``, with the compressors of earlier --compress-module files."""
    from megatron.compression.listing import describe_name, list_names
    from megatron.compression.plugins import build_registry

    module_flag = spell("compress-module")
    files = [text for _, flag, texts in namespace.events if spell(flag) == module_flag for text in texts]
    registry = build_registry(files)
    return (describe_name(registry, name) if name else list_names(registry)) + "\n"


class _RaisingParser(argparse.ArgumentParser):
    """Argument parser that raises UserError instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        match = re.fullmatch(r"argument (--[^/:\s]+)[^:]*: (.*)", message, flags=re.DOTALL)
        raise UserError(f"{match[1]}: {match[2]}" if match else f"{message}; --help all lists all flags")
