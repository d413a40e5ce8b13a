"""Text of --help: its groups of flags, and how a flag, its value and its default are shown."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.base.errors import UserError
from megatron.base.option import FieldOption, summary_of_class
from megatron.base.user_text import nearest, spell
from megatron.config.collect import FlagTable, Target
from megatron.config.translate.rules import SWITCH, VALUE, VALUES

COMMON_GROUPS = (
    "task",
    "data",
    "model size",
    "model form",
    "batch and length",
    "learning rate",
    "layout",
    "experts",
    "precision",
    "save and resume",
    "evaluate and log",
    "compress",
)
"""Groups of the short --help, in the order in which a user needs them; an option names its group by ``common``."""

_NARGS = {SWITCH: "?", VALUE: None, VALUES: "*"}

ALL = "all"
"""Name of all groups together, after --help."""


@dataclass(frozen=True)
class HelpGroup:
    """Flags that --help shows under one title.

    name: name of the group after --help.
    """

    name: str
    title: str
    about: str
    targets: tuple[Target, ...]


def all_groups(table: FlagTable) -> list[HelpGroup]:
    """A group for each section, and a group of shorthand and old names."""
    groups = []
    for section, cls in table.sections.items():
        fields = tuple(field for field in table.fields.values() if field.section == section)
        groups.append(HelpGroup(section, section, summary_of_class(cls), fields))
    documented_flags = tuple(old for old in table.translator.flags if old.help)
    if documented_flags:
        groups.append(HelpGroup("shorthand", "shorthand and old names", "", documented_flags))
    return groups


def common_groups(table: FlagTable) -> list[HelpGroup]:
    """Groups of the flags that most runs need."""
    groups = []
    for title in COMMON_GROUPS:
        fields = tuple(field for field in table.fields.values() if field.option.common == title)
        if fields:
            sections = dict.fromkeys(field.section for field in fields)
            groups.append(HelpGroup(title, title, "more: " + ", ".join(f"--help {name}" for name in sections), fields))
    return groups


def selected_groups(table: FlagTable, name: str, short_groups: Sequence[HelpGroup]) -> Sequence[HelpGroup]:
    """Groups that ``--help NAME`` shows, or --help if the name is empty.

    Args:
        table: flags of the program.
        name: name of a group, "all", or "".
        short_groups: groups of the short --help; empty if --help shows all flags.

    Raises:
        UserError: if no group has this name.
    """
    groups = all_groups(table)
    if not name:
        return short_groups or groups
    if spell(name) == ALL:
        return groups
    selected = [group for group in (*groups, *short_groups) if spell(group.name) == spell(name)][:1]
    if not selected:
        names = [ALL, *(group.name for group in groups)]
        raise UserError(f"--help {name}: no such group{nearest(name, names)}; the groups are {', '.join(names)}")
    return selected


class HelpFormatter(argparse.HelpFormatter):
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
        if not isinstance(action, RecordAction):
            return super()._format_action_invocation(action)
        if action.nargs == "?":
            return action.option_strings[0]
        return f"{action.option_strings[0]} {action.metavar}"


class RecordAction(argparse.Action):
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


def add_target(container: argparse._ActionsContainer, target: Target, help: str | None = None) -> None:
    """Add a flag to a parser or a group of it, with its help unless another is given."""
    if isinstance(target, FieldOption):
        nargs: int | str | None = None
        if target.is_switch:
            nargs = "?"
        elif target.is_list and not target.option.repeatable:
            nargs = target.option.count or "+"
        details = []
        option = target.option
        if target.choices and len("|".join(target.choices)) > 45:
            details.append(f"one of {', '.join(target.choices)}")
        if option.unit:
            details.append(option.unit)
        default = default_text(target)
        if default:
            details.append(default if default == "required" else f"default: {default}")
        if option.aliases:
            details.append("also " + ", ".join(f"--{alias}" for alias in option.aliases))
        text = f"{target.option.help} ({'; '.join(details)})" if details else target.option.help.strip()
        flags: Sequence[str] = target.flags
        metavar = metavar_of(target)
    else:
        nargs, text, flags, metavar = _NARGS[target.arity], target.help, (target.name,), "VALUE"
    container.add_argument(
        *dict.fromkeys([f"--{flags[0]}", *(f"--{spell(flag)}" for flag in flags)]),
        action=RecordAction,
        dest="events",
        default=argparse.SUPPRESS,
        target=target,
        nargs=nargs,
        metavar=metavar,
        help=(text if help is None else help).replace("%", "%%"),
    )


def metavar_of(field_option: FieldOption) -> str:
    """Placeholder for the value of a flag in the help text; empty for a switch."""
    if field_option.is_switch:
        return ""
    if field_option.option.metavar:
        return field_option.option.metavar
    if field_option.choices and len("|".join(field_option.choices)) <= 45:
        return "|".join(field_option.choices)
    return {int: "N", float: "X"}.get(field_option.element, "TEXT")


def default_text(field_option: FieldOption) -> str:
    """Default value in the help text; empty for a switch that is off by default."""
    if field_option.is_switch:
        return field_option.option.when_unset
    if field_option.option.required:
        return "required"
    if field_option.option.when_unset:
        return field_option.option.when_unset
    if field_option.is_list:
        return " ".join(map(str, field_option.default)) or "none"
    return number_text(field_option.default)


def number_text(value: Any) -> str:
    """Short text of a default value: 2**32, 1e-05, 0.1; strings unchanged."""
    if isinstance(value, float) and value >= 2**16 and value.is_integer():
        integer = int(value)
        if integer & (integer - 1) == 0:
            return f"2**{integer.bit_length() - 1}"
    return f"{value:g}" if isinstance(value, float) else str(value)
