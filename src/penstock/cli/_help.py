"""How the options of a verb are listed: by panels, in plain text that reads the same on a terminal and in a pager."""

from typing import Any

from typer.core import TyperCommand

ARGUMENTS, REST = "Arguments", "Options"


class PanelCommand(TyperCommand):
    """A verb whose help has a section for every panel of its options (`rich_help_panel`), in the order of their first
    option; those without one, which are the verb's own, come first.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None:
                default = ARGUMENTS if option.param_type_name == "argument" else REST
                panels.setdefault(getattr(option, "rich_help_panel", None) or default, []).append(record)
        arguments, rest = panels.pop(ARGUMENTS, []), panels.pop(REST, [])
        own = [(REST, rest)] if len(rest) > 1 else []
        last = [] if own else [(REST, rest)]  # --help alone
        for name, records in [(ARGUMENTS, arguments), *own, *panels.items(), *last]:
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
