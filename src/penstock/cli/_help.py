"""How the options of a verb are listed: by panels, in plain text that reads the same on a terminal and in a pager."""

from typing import Any

from typer.core import TyperCommand

REST = "Options"


class PanelCommand(TyperCommand):
    """A verb whose help has a section for every panel of its options (`rich_help_panel`), in the order of their first
    option; those without one come last.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if option.param_type_name == "argument" else REST
                panels.setdefault(getattr(option, "rich_help_panel", None) or default, []).append(record)
        rest = panels.pop(REST, [])
        for name, records in [*panels.items(), (REST, rest)]:
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
