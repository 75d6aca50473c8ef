"""
`config.example.toml`, printed from the declarations of `config.py`.

Every setting stands there with its default, its help text and what is allowed; what has no fixed default is
commented out, or filled with something to replace. The printed text reads back as the defaults.
"""

import json
import textwrap

import msgspec

from kvpool.config import DeviceSettings, Field, PoolSettings, fields_of, format_size

_COLUMNS = 100

_HEAD = """\
# kvpool: every setting, with its default.
#
# kvpool serve --config FILE         runs a pool on it
# kvpool config check FILE           says whether it is right
# "kvpool_config": "FILE"            in vLLM's kv_connector_extra_config: engines use (and start) this pool
#
# Sizes are written "512MiB", "4GiB"; times are in seconds.
"""


def example() -> str:
    """Return the text of `config.example.toml`."""
    return "\n".join([_HEAD, _section("[pool]", PoolSettings), _section("[[device]]", DeviceSettings)])


def _section(title: str, struct: type[msgspec.Struct]) -> str:
    note = (struct.__doc__ or "").partition(": ")[2]
    return "\n".join([*_comment(note[:1].upper() + note[1:]), title, *map(_setting, fields_of(struct))]) + "\n"


def _setting(field: Field) -> str:
    facts = f"{field.rule.help} Allowed: {field.allowed}." if field.kind in (int, float) else field.rule.help
    if field.rule.derived:
        facts = f"{facts} Without it: {field.rule.derived}."
    line = f"{field.key} = {_value(field)}"
    return "\n".join(["", *_comment(facts), f"# {line}" if field.rule.derived else line])


def _value(field: Field) -> str:
    if field.default is msgspec.NODEFAULT:
        return json.dumps(field.rule.shown)
    if field.rule.unit == "bytes":
        return json.dumps(format_size(field.default))
    return json.dumps(field.default)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, initial_indent="# ", subsequent_indent="# ")
